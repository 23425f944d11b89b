"""Variants of a job: every combination of values of some keys, those that cannot be left out and counted, the others
rehearsed and ordered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import RLConfig
from megarlhf.layout import split_layers
from megarlhf.rehearsal.job import roles_of
from megarlhf.rehearsal.result import Result
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from megarlhf.weights.plan.traffic import model_elements

BYTES = {"fp32": 4, "bf16": 2}
TRAINED_BYTES = 4 + 12
"""Of a parameter that is trained, beside its own: fp32 gradient, main parameter and two moments. The last three are
spread over data-parallel ranks."""


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """One combination."""

    overrides: tuple[str, ...]
    cfg: Any


@dataclass
class Sweep:
    """What became of all combinations."""

    done: list[tuple[Variant, Result]] = field(default_factory=list)
    """Best first."""
    illegal: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """(overrides, why)"""
    too_large: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    """(overrides, bytes of parameters and what belongs to them on the fullest rank)"""
    failed: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def parse_axes(words: Sequence[str]) -> list[Axis]:
    """`section.key=a,b,c` of each. Raises: ValueError for anything else, and for a key that is given twice."""
    axes = []
    for word in words:
        key, equals, values = word.partition("=")
        found = tuple(filter(None, values.split(",")))
        if not (key and equals and found):
            raise ValueError(f"--sweep {word}: expected section.key=value,value,...")
        if len(set(found)) < len(found):
            raise ValueError(f"--sweep {word}: a value stands there twice; give each once")
        axes.append(Axis(key, found))
    keys = [axis.key for axis in axes]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"--sweep names {', '.join(repeated)} twice; give all its values at once")
    return axes


def variants(
    axes: Sequence[Axis], load: Callable[[Sequence[str]], Any], check: Callable[[Any], None]
) -> Iterator[tuple[tuple[str, ...], Any | str]]:
    """(overrides, the configuration or why there is none). `load` reads the file with overrides, `check` refuses what
    cannot run.

    Raises: ValueError for a key that the configuration does not have: it is misspelt in every combination.
    """
    for axis in axes:
        _require_known(axis, load)
    for values in itertools.product(*(axis.values for axis in axes)):
        overrides = tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
        try:
            cfg = load(overrides)
            check(cfg)
        except ValueError as error:
            yield overrides, str(error)
            continue
        yield overrides, cfg


def _require_known(axis: Axis, load: Callable[[Sequence[str]], Any]) -> None:
    """Raises: ValueError with the loader's own words, where no value of the axis is read because of its key."""
    reasons = []
    for value in axis.values:
        try:
            load([f"{axis.key}={value}"])
        except ValueError as error:
            reasons.append(str(error))
    if len(reasons) == len(axis.values) and any("unknown key" in reason for reason in reasons):
        raise ValueError(f"--sweep {axis.key}: {reasons[0]}")


def least_bytes(cfg: Any, world_size: int) -> int:
    """What parameters alone take on the fullest rank: parameters, gradients, optimizer, and the engine's weights. No
    activation, no cache, no message: what is above the device cannot fit, whatever a rehearsal would find."""
    trained = {"sft": ("actor",), "rm": ("reward_model",)}.get(command_of(cfg), ("actor", "critic"))
    total = 0.0
    for name, section in roles_of(cfg).items():
        arch = architecture_from_hf(section.model.hf_directory())
        layout = section.parallel.layout(world_size, name)
        dtype = resolve_dtype(name, section.model, "scalar" if name in ("critic", "reward_model") else "lm").name
        layers = max(
            len(stage) for stage in split_layers(arch.num_layers, layout.pp, section.parallel.layers_per_stage)
        )
        # The layers of the fullest stage, without embedding and head, which need not be on it.
        embeddings = arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2)
        own = (model_elements(arch) - embeddings) * layers / arch.num_layers / layout.tp
        total += own * BYTES[dtype]
        if name in trained:
            total += own * (4 + (TRAINED_BYTES - 4) / layout.dp)
    if isinstance(cfg, RLConfig) and cfg.rollout.engine == "vllm":
        arch = architecture_from_hf(cfg.actor.model.hf_directory())
        dtype = cfg.rollout.dtype if cfg.rollout.dtype != "auto" else resolve_dtype("actor", cfg.actor.model, "lm").name
        total += model_elements(arch) / cfg.rollout.tp(cfg.actor) * BYTES[dtype]
    return int(total)


def command_of(cfg: Any) -> str:
    """Of a configuration."""
    return type(cfg).__name__.removesuffix("Config").lower()


def order(found: Sequence[tuple[Variant, Result]]) -> list[tuple[Variant, Result]]:
    """Best first: what fits, by the time of the last step; then what does not, by how little is missing."""

    def rank(each: tuple[Variant, Result]) -> tuple[bool, float]:
        result = each[1]
        if result.fits and result.times:
            return False, result.times[-1].seconds
        return True, -float(result.free)

    return sorted(found, key=rank)
