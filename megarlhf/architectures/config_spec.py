"""How the config.json of one model type states an architecture: data, read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarlhf.architectures.rope import ROPE_TYPES, read_rope, write_scaling

REQUIRED: Any = object()


Facts = Mapping[str, Any]
"""Fields of an `Architecture` by name."""


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A field that config.json has."""

    name: str
    read: Callable[[str, Any], Any]
    """(name, value) -> the field; raises ValueError on a value it does not take."""
    default: Any = REQUIRED
    """Where it is absent or null; a callable gets the facts read so far."""
    alias: str | None = None
    """An older name of the key."""
    null_is_none: bool = False
    """null is a value of its own (None), not absence."""


@dataclass(frozen=True)
class Refusal:
    """A key whose values change what the model computes in ways that the model code does not follow."""

    key: str
    wrong: Callable[[Any, Facts], bool]
    advice: str


def only(key: str, value: bool, advice: str) -> Refusal:
    """Any other value than this one is refused."""
    return Refusal(key, lambda stated, facts: stated is not value, advice)


@dataclass(frozen=True, kw_only=True)
class ConfigSpec:
    """Meaning of the keys in a model type's config.json."""

    lm_class: str
    scalar_class: str
    facts: Facts
    """Rule of each field of `Architecture`, in an order in which defaults can be computed: a `ConfigField`, a function
    of the facts before it, or a value that holds for every model of this type."""
    rope_theta: float | None = 10000.0
    """Rotary base where config.json has none; None: the model has no rotary embedding."""
    rope_types: tuple[str, ...] = ROPE_TYPES
    """RoPE types that transformers accepts for this model type."""
    refusals: tuple[Refusal, ...] = ()
    window: Callable[[Mapping[str, Any], Facts], str] = lambda config, facts: ""
    """Why some layers have a sliding window that `facts` do not have; empty: none has."""


def read_facts(config: Mapping[str, Any], spec: ConfigSpec) -> dict[str, Any]:
    """The fields of the architecture that config.json describes, all but `model_type`.

    Raises: ValueError on a missing key, or on anything the model code would compute wrongly.
    """
    _refuse_quantized(config)
    facts: dict[str, Any] = {}
    for field, fact in spec.facts.items():
        if isinstance(fact, ConfigField):
            facts[field] = _read(config, fact, facts)
        else:
            facts[field] = fact(facts) if callable(fact) else fact
    facts["rope_theta"], facts["rope_scaling"] = 0.0, None
    if spec.rope_theta is not None:
        facts |= read_rope(config, facts, theta=spec.rope_theta, types=spec.rope_types)
    _check_heads(facts, spec)
    _check_experts(facts, spec)
    _check_windows(config, facts, spec)
    for refusal in spec.refusals:
        value = config.get(refusal.key)
        if value is not None and refusal.wrong(value, facts):
            raise ValueError(
                f"config.json has {refusal.key} = {value!r}, which is not supported for {config.get('model_type')}; "
                f"{refusal.advice}"
            )
    return facts


def write_facts(facts: Facts, spec: ConfigSpec) -> dict[str, Any]:
    """The keys of a config.json that `read_facts` reads back to the same facts.

    Rotary numbers are written in the style that transformers 4 and 5 and vLLM all read.
    """
    config = {fact.name: facts[field] for field, fact in spec.facts.items() if isinstance(fact, ConfigField)}
    if spec.rope_theta is not None:
        config["rope_theta"] = facts["rope_theta"]
        config |= write_scaling(facts["rope_scaling"])
    return config


# --- readers of values ----------------------------------------------------------------------------


def positive(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json has {key} = {value!r}, expected a positive integer; correct config.json")
    return value


def number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json has {key} = {value!r}, expected a positive number; correct config.json")
    return float(value)


def flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"config.json has {key} = {value!r}, expected true or false; correct config.json")
    return value


def one_of(*supported: str) -> Callable[[str, Any], str]:
    """A name of which the model code computes these."""

    def read(key: str, value: Any) -> str:
        if value not in supported:
            raise ValueError(
                f"config.json has {key} {value!r}; supported for this model_type: {', '.join(supported)}. "
                "Use a model with one of these"
            )
        return value

    return read


def equal_heads(facts: Facts) -> int:
    """Channels per head where config.json does not state them."""
    hidden_size, num_heads = facts["hidden_size"], facts["num_heads"]
    if hidden_size % num_heads:
        raise ValueError(
            f"config.json has no head_dim, and its hidden size {hidden_size} is not a multiple of its {num_heads} "
            "attention heads; add head_dim to config.json"
        )
    return hidden_size // num_heads


# --- what several keys say together ---------------------------------------------------------------


def _read(config: Mapping[str, Any], key: ConfigField, facts: Facts) -> Any:
    name = key.alias if key.alias is not None and key.alias in config and key.name not in config else key.name
    value = config.get(name)
    if value is None:
        if key.null_is_none and name in config:
            return None
        if key.default is not REQUIRED:
            return key.default(facts) if callable(key.default) else key.default
    return key.read(name, value)


def _key_of(spec: ConfigSpec, field: str) -> str:
    """The key of config.json that states a field; the field's own name where none does."""
    fact = spec.facts.get(field)
    return fact.name if isinstance(fact, ConfigField) else field


def _check_heads(facts: Facts, spec: ConfigSpec) -> None:
    if facts["num_heads"] % facts["num_kv_heads"]:
        names = [_key_of(spec, field) for field in ("num_heads", "num_kv_heads")]
        raise ValueError(
            f"config.json has {names[0]} = {facts['num_heads']}, not a multiple of {names[1]} = "
            f"{facts['num_kv_heads']}; correct config.json"
        )


def _check_experts(facts: Facts, spec: ConfigSpec) -> None:
    if facts.get("experts_per_token", 0) > facts.get("num_experts", 0):
        names = [_key_of(spec, field) for field in ("experts_per_token", "num_experts")]
        raise ValueError(
            f"config.json has {names[0]} = {facts['experts_per_token']}, more than {names[1]} = "
            f"{facts['num_experts']}; correct config.json"
        )


def _check_windows(config: Mapping[str, Any], facts: Facts, spec: ConfigSpec) -> None:
    """Raises: ValueError unless every layer has the window of `facts`, or none where they have none."""
    types, window = config.get("layer_types"), facts.get("sliding_window")
    if types is not None:
        if not isinstance(types, list) or len(types) != facts["num_layers"]:
            got = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ValueError(
                f"config.json has {got} in layer_types, expected one for each of its {facts['num_layers']} layers "
                f"({_key_of(spec, 'num_layers')}); correct config.json"
            )
        kind = "full_attention" if window is None else "sliding_attention"
        if others := [layer for layer, name in enumerate(types) if name != kind]:
            raise ValueError(
                f"config.json has layer_types {types[others[0]]!r} for {len(others)} of {len(types)} layers (layer "
                f"{others[0]}, ...), expected {kind!r} for all, as sliding_window = {window} is read for "
                f"{config.get('model_type')}: layers that differ are not implemented; use a model whose layers are "
                "alike"
            )
    if why := spec.window(config, facts):
        raise ValueError(
            f"config.json has {why}: such a window is not implemented for {config.get('model_type')}; use a model "
            "whose layers have none"
        )


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"config.json has a quantization_config ({method!r}): its weights are not the model's values; "
            "use the checkpoint in bf16, fp16 or fp32"
        )
