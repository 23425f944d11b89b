"""Variants of a job: every combination of values of some keys, their least memory, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import count_elements
from megarlhf.config import ROLES, DPOConfig, RLConfig, trained_roles
from megarlhf.rehearsal.result import Result
from megarlhf.rollout.engines import engine_of
from megarlhf.weights.checkpoint.dtype import resolve_dtype

BYTES = {"fp32": 4, "bf16": 2}
GRADIENT, MOMENTS = 4, 8
"""Bytes per trained parameter beside its own: a gradient in fp32 and two moments. The moments, and a main parameter in
fp32 of one that is in bf16, are spread over data- and context-parallel ranks."""


@dataclass(frozen=True)
class Axis:
    """A key and its values."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """One combination."""

    overrides: tuple[str, ...]
    cfg: Any


@dataclass
class Sweep:
    """Outcome of all combinations."""

    done: list[tuple[Variant, Result]] = field(default_factory=list)
    """Best first."""
    illegal: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """(overrides, why)"""
    too_large: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    """(overrides, bytes of parameters, gradients and optimizer on the fullest rank)"""
    slower: list[tuple[tuple[str, ...], float]] = field(default_factory=list)
    """(overrides, estimated seconds of the rollout): they differ from one that runs in the engine alone, and their
    rollout takes clearly longer."""
    failed: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """(overrides, the program's error)"""

    @property
    def best(self) -> Variant | None:
        """The best variant; None where no variant runs."""
        return self.done[0][0] if self.done and self.done[0][1].runs else None


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Axes from texts such as `section.key=a,b,c`.

    Raises: ValueError for any other text, for a repeated value and for a repeated key.
    """
    axes = []
    for text in texts:
        key, equals, listed = text.partition("=")
        values = tuple(filter(None, _values(listed)))
        if not (key and equals and values):
            raise ValueError(f"--sweep {text}: expected section.key=value,value,...")
        if len(set(values)) < len(values):
            raise ValueError(f"--sweep {text}: a value is given twice; give each once")
        axes.append(Axis(key, values))
    keys = [axis.key for axis in axes]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"--sweep names {', '.join(repeated)} twice; give all its values at once")
    return axes


def _values(text: str) -> list[str]:
    """Parts of a text between commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and not depth:
            parts.append("")
            continue
        parts[-1] += character
    return parts


def variants(
    axes: Sequence[Axis], load: Callable[[Sequence[str]], Any], check: Callable[[Any], None]
) -> Iterator[tuple[tuple[str, ...], Any | str]]:
    """(overrides, the configuration or the reason why there is none) of every combination.

    load: reads the configuration file with overrides.
    check: refuses what cannot run.
    Raises: ValueError for an unknown key (it is misspelt in every combination), and where no combination can be read.
    """
    for axis in axes:
        _require_known(axis, load)
    loaded, combinations = [], list(itertools.product(*(axis.values for axis in axes)))
    for values in combinations:
        overrides = tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
        try:
            loaded.append((overrides, load(overrides)))
        except ValueError as error:
            loaded.append((overrides, str(error)))
    if all(isinstance(cfg, str) for _, cfg in loaded):
        raise ValueError(f"--sweep: none of {len(combinations)} combinations can be read; the first: {loaded[0][1]}")
    for overrides, cfg in loaded:
        try:
            if not isinstance(cfg, str):
                check(cfg)
        except ValueError as error:
            cfg = str(error)
        yield overrides, cfg


def _require_known(axis: Axis, load: Callable[[Sequence[str]], Any]) -> None:
    """Refuse a key that the configuration does not have.

    Raises: ValueError with the loader's message, where no value of the axis can be read because of its key.
    """
    reasons = []
    for value in axis.values:
        try:
            load([f"{axis.key}={value}"])
        except ValueError as error:
            reasons.append(str(error))
    if len(reasons) == len(axis.values) and any("unknown key" in reason for reason in reasons):
        raise ValueError(f"--sweep {axis.key}: {reasons[0]}")


def least_bytes(cfg: Any, world_size: int, *, gpu: bool = True) -> int:
    """Least memory of the fullest rank: parameters, gradients, optimizer and the engine's weights, in the turn in which
    they take most, each unless it is offloaded then.

    No activation, no cache and no message is included. A job that needs more than a device has cannot fit, whatever a
    rehearsal would find.

    gpu: whether the hardware is a GPU, which decides what `auto` means.
    """
    trained = trained_roles(cfg)
    auto = gpu and isinstance(cfg, RLConfig | DPOConfig)
    stays, turns = 0.0, [0.0]
    for name, section in cfg.roles().items():
        arch = architecture_from_hf(section.model.hf_directory())
        layout = section.parallel.layout(world_size, name)
        dtype = resolve_dtype(name, section.model, ROLES[name].head).name
        # An equal share of the layers, than which the fullest stage has no less. Embedding and head may be on others.
        embeddings = arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2)
        others, experts = count_elements(arch)
        own = (others - embeddings + experts / layout.ep) / layout.pp / layout.tp
        parameters, gradients, optimizer = own * BYTES[dtype], 0.0, 0.0
        if name in trained:
            main = 0 if dtype == "fp32" else 4
            gradients, optimizer = own * GRADIENT, own * (main + MOMENTS) / (layout.dp * layout.cp)
        offload = section.offload
        optimizer_policy = "stream" if offload.optimizer == "auto" and auto else offload.optimizer
        parts = ((parameters, offload.parameters), (gradients, offload.gradients), (optimizer, optimizer_policy))
        leaves = [auto if policy == "auto" else bool(policy) for _, policy in parts]
        stays += sum(nbytes for (nbytes, _), offloaded in zip(parts, leaves, strict=True) if not offloaded)
        # A streamed optimizer is never there as a whole.
        turns.append(sum(n for (n, policy), away in zip(parts, leaves, strict=True) if away and policy != "stream"))
    if isinstance(cfg, RLConfig) and engine_of(cfg.rollout).has_own_weights:
        arch = architecture_from_hf(cfg.actor.model.hf_directory())
        dtype = cfg.rollout.dtype if cfg.rollout.dtype != "auto" else resolve_dtype("actor", cfg.actor.model, "lm").name
        weights = sum(count_elements(arch)) / cfg.rollout.tp(cfg.actor) * BYTES[dtype]
        level = cfg.rollout.vllm.sleep_level
        sleeps = auto if level == "auto" else level > 0
        stays += 0.0 if sleeps else weights
        turns.append(weights if sleeps else 0.0)
    return int(stays + max(turns))


def trainer_of(cfg: Any) -> str:
    """A configuration without what decides the time of rollouts. Steps of two with equal texts differ in nothing else
    that takes long: with slices a trainer also compares a few responses, and weighs tokens."""
    rollout = cfg.rollout
    args = {name: value for name, value in rollout.vllm.args.items() if name != "max_num_seqs"}
    vllm = rollout.vllm.model_copy(update={"gpu_memory_utilization": 0, "cpu_cache_gib": 0, "args": args})
    engine = {"slices": 1, "parallel": None, "vllm": vllm, "balance": None}
    return str(cfg.model_copy(update={"rollout": rollout.model_copy(update=engine)}))


def best_first(done: Sequence[tuple[Variant, Result]]) -> list[tuple[Variant, Result]]:
    """Variants that run, by trained tokens per second in the last step; then variants that run and have no time, and
    those that do not run, by the bytes that are left."""

    def rank(pair: tuple[Variant, Result]) -> tuple[int, float]:
        result = pair[1]
        if result.runs and result.times:
            return 0, -result.times[-1].tokens_per_second
        return 1 if result.runs else 2, -float(result.free)

    return sorted(done, key=rank)
