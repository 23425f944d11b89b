"""How config.json states a rotary embedding and its scaling, read and written.

What a type computes is in `models/attention/rotary_frequencies.py`. Two types depend on the length of a sequence, and
there transformers and vLLM part:

- `dynamic`: transformers makes new frequencies whenever a sequence grows beyond `max_position_embeddings`, and keys
  that it has cached keep the old ones; vLLM has one table, which ends there. Up to there both compute no scaling.
- `longrope`: beyond `original_max_position_embeddings` transformers takes the long factors for the whole batch; vLLM
  takes them for all sequences of an engine that may hold a longer one. Up to there both take the short ones.

So both are computed up to there, and longer sequences are refused: `Architecture.longest_sequence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from megarlhf.architectures.architecture import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope

Facts = Mapping[str, Any]
Rope = Mapping[str, Any]
"""`rope_scaling`, or transformers 5's `rope_parameters`."""

_ORIGINAL = "original_max_position_embeddings"
_ALIASES = {"su": "longrope"}
"""Older names of rope types."""


def read_rope(config: Mapping[str, Any], facts: Facts, *, theta: float, types: tuple[str, ...]) -> dict[str, Any]:
    """Rotary base, scaling and, where the family states one, the share of a head that is turned, as fields of an
    `Architecture`: from `rope_scaling` and `rope_theta`, or from transformers 5's `rope_parameters`, which a
    `rope_scaling` beside it replaces, as it does there.

    theta: the base where config.json has none; types: the rope types that the family takes

    Raises: ValueError on anything that the model code, transformers and vLLM would not compute alike.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json has rotary parameters {rope!r}, expected an object; correct config.json")
    stated = rope.get("rope_type", rope.get("type", "default"))
    rope_type = _ALIASES.get(stated, stated)
    if rope_type not in types:
        raise ValueError(
            f"config.json has rope type {rope_type!r}; supported for this model_type: {', '.join(types)}. "
            "Use a model with one of these, or with its rotary scaling removed"
        )
    base = _number({"rope_theta": rope.get("rope_theta", config.get("rope_theta") or theta)}, "rope_theta")
    facts_of_rope: dict[str, Any] = {"rope_theta": base, **_share(config, rope, facts)}
    if rope_type == "default":
        return facts_of_rope | {"rope_scaling": None}
    if config.get(_ORIGINAL) is not None:  # transformers takes the outer one where both are there
        rope = {**rope, _ORIGINAL: config[_ORIGINAL]}
    return facts_of_rope | {"rope_scaling": _READERS[rope_type](rope, {**facts, **facts_of_rope})}


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of config.json that say so, in the style that transformers 4 and 5 and vLLM all read."""
    if scaling is None:
        return {"rope_scaling": None}
    stated = {_KEYS.get(name, name): value for name, value in asdict(scaling).items()}
    outer: dict[str, Any] = {}
    if isinstance(scaling, LongRope):
        stated |= {key: list(stated[key]) for key in ("short_factor", "long_factor")}
        # Both compute it from the two lengths; vLLM reads no other.
        del stated["attention_factor"]
        # Where Phi-3 has it.
        outer[_ORIGINAL] = scaling.original_max_positions
    return {"rope_scaling": {"rope_type": _NAMES[type(scaling)], **stated}, **outer}


def fields_of_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Plain data of a scaling, which `scaling_of_fields` reads back. Llama 3.1's has no name in it, as always."""
    if scaling is None or isinstance(scaling, Llama3Rope):
        return None if scaling is None else asdict(scaling)
    return {"rope_type": _NAMES[type(scaling)], **asdict(scaling)}


def scaling_of_fields(values: Mapping[str, Any] | None) -> RopeScaling | None:
    """Raises: TypeError or KeyError for what `fields_of_scaling` does not write."""
    if values is None:
        return None
    kinds = {name: kind for kind, name in _NAMES.items()}
    kind = kinds[values.get("rope_type", "llama3")]
    named = {key: value for key, value in values.items() if key != "rope_type"}
    scaling: RopeScaling = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in named.items()})
    return scaling


_NAMES: Mapping[type, str] = {
    LinearRope: "linear",
    DynamicRope: "dynamic",
    YarnRope: "yarn",
    LongRope: "longrope",
    Llama3Rope: "llama3",
}
"""The rope types, by what they are read into."""

ROPE_TYPES = ("default", *_NAMES.values())
_KEYS = {"original_max_positions": _ORIGINAL}


# --- readers --------------------------------------------------------------------------------------


def _share(config: Mapping[str, Any], rope: Rope, facts: Facts) -> dict[str, float]:
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "rotary_share" not in facts:
        if share not in (None, 1, 1.0):
            raise ValueError(
                f"config.json has partial_rotary_factor = {share!r}; supported for this model_type: 1. Use a model "
                "that rotates whole heads"
            )
        return {}
    share = _number(
        {"partial_rotary_factor": facts["rotary_share"] if share is None else share}, "partial_rotary_factor"
    )
    turned = int(facts["head_dim"] * share)
    if share > 1 or turned < 2 or turned % 2:
        raise ValueError(
            f"config.json has partial_rotary_factor = {share:g} of heads of {facts['head_dim']}: {turned} channels to "
            "turn; expected an even number of them, 2 or more; correct config.json"
        )
    return {"rotary_share": share}


def _number(rope: Rope, key: str, default: float | None = None) -> float:
    value = rope.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json has {key} = {value!r}, expected a positive number; correct config.json")
    return float(value)


def _require(rope: Rope, rope_type: str, *keys: str) -> None:
    missing = [key for key in keys if rope.get(key) is None]
    if missing:
        raise ValueError(f"config.json has rope type {rope_type!r} without {', '.join(missing)}; add them")


def _factor(rope: Rope, rope_type: str) -> float:
    """The attention factor. One below 1 would shorten what the model can read."""
    _require(rope, rope_type, "factor")
    factor = _number(rope, "factor")
    if factor < 1:
        raise ValueError(f"config.json has rope type {rope_type!r} with factor = {factor:g}, expected 1 or more")
    return factor


def _linear(rope: Rope, facts: Facts) -> LinearRope:
    return LinearRope(factor=_factor(rope, "linear"))


def _dynamic(rope: Rope, facts: Facts) -> DynamicRope:
    for key in ("alpha", "max_trained_positions"):
        if rope.get(key) is not None:
            raise ValueError(
                f"config.json has rope type 'dynamic' with {key} = {rope[key]!r}, which vLLM computes and transformers "
                "does not; use a model without it"
            )
    return DynamicRope(factor=_factor(rope, "dynamic"))


def _yarn(rope: Rope, facts: Facts) -> YarnRope:
    factor = _factor(rope, "yarn")
    original = int(_number(rope, _ORIGINAL, facts["max_positions"]))
    if facts["max_positions"] > original * factor:
        raise ValueError(
            f"config.json has max_position_embeddings = {facts['max_positions']}, more than rope type 'yarn' reaches: "
            f"{_ORIGINAL} x factor = {original} x {factor:g} = {original * factor:g}, where vLLM's table ends; correct "
            "one of the three"
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"config.json has truncate = {truncate!r}, expected true or false; correct config.json")
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        attention_factor=_number(rope, "attention_factor", _yarn_attention(rope, factor)),
        truncate=truncate,
    )


def _yarn_attention(rope: Rope, factor: float) -> float:
    """Default attention factor of transformers and vLLM, for a config.json without one."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(_number(rope, "mscale")) / scale(_number(rope, "mscale_all_dim"))
    return scale(1.0)


def _longrope(rope: Rope, facts: Facts) -> LongRope:
    _require(rope, "longrope", "short_factor", "long_factor", _ORIGINAL)
    original = int(_number(rope, _ORIGINAL))
    ratio = facts["max_positions"] / original
    attention = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    for key, computed in (
        *(("factor", ratio), ("attention_factor", attention)),
        *(("short_mscale", attention), ("long_mscale", attention)),
    ):
        if rope.get(key) is not None and not math.isclose(_number(rope, key), computed, rel_tol=1e-6):
            raise ValueError(
                f"config.json has rope type 'longrope' with {key} = {rope[key]!r}, which one of transformers and vLLM "
                f"reads and the other computes from the two lengths as {computed:g}; use a model without {key}"
            )
    wanted = int(facts["head_dim"] * facts.get("rotary_share", 1.0)) // 2
    factors = {}
    for key in ("short_factor", "long_factor"):
        values = rope[key]
        if not isinstance(values, list | tuple) or len(values) != wanted:
            raise ValueError(
                f"config.json has {key} with {len(values) if isinstance(values, list | tuple) else values!r} "
                f"numbers, expected {wanted}, one for each pair of channels that is turned; correct config.json"
            )
        factors[key] = tuple(_number({key: value}, key) for value in values)
    return LongRope(**factors, original_max_positions=original, attention_factor=attention)


def _llama3(rope: Rope, facts: Facts) -> Llama3Rope:
    keys = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
    _require(rope, "llama3", *keys)
    factor, low, high, original = (_number(rope, key) for key in keys)
    return Llama3Rope(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=int(original))


_READERS: Mapping[str, Callable[[Rope, Facts], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
