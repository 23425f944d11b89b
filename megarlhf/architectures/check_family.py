"""Checks of a user's family, before a rank starts: a mistake in it would show in the middle of a run, or not at all."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.config_spec import REQUIRED, ConfigField
from megarlhf.architectures.table import Entry, Family, Place, Table, TPRank, always, dimensions, logical_tensors_of
from megarlhf.own_code.failures import describe_error, short

_SAMPLE: Mapping[str, Any] = {
    "num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn_size": 10,
    "vocab_size": 14, "max_positions": 16, "norm_eps": 1e-5, "tied_embeddings": False, "qkv_bias": True,
    "output_bias": True, "mlp_bias": True, "activation": "silu", "num_experts": 3, "experts_per_token": 2,
    "expert_ffn_size": 18,
}  # fmt: skip
"""A small model, on which functions and rules are tried; no two sizes of a tensor are alike."""
_READ_APART = {
    "model_type": "it is Family.model_type",
    "rope_theta": "it is ConfigSpec.rope_theta",
    "rope_scaling": "it is read for every family with ConfigSpec.rope_theta",
    "adapter": "it is no property of a family",
}
"""Fields of `Architecture` that are no facts, with the reason."""
_FIELDS = {field.name: field for field in fields(Architecture) if field.name not in _READ_APART}


def check_family(family: Any, where: str) -> None:
    """Check types, facts, names, shapes and rules of a family, in this order. where: begin of a message

    Raises: ValueError that says what is wrong, what was expected, and what to do.
    """
    if not isinstance(family, Family):
        raise ValueError(
            f"{where} is {short(family)}, expected a Family (`from megarlhf import family_parts`); make one"
        )
    for check in (_wrong_types, _wrong_facts, _wrong_names, _wrong_shapes, _wrong_rules):
        problem = next(check(family), None)
        if problem is not None:
            raise ValueError(f"{where}{problem}")


# --- types ------------------------------------------------------------------------------------------


def _wrong_types(family: Family) -> Iterator[str]:
    yield from _wrong_fields(family, "")
    table = family.table
    for name in ("hf_layer", "megatron_layer", "vllm_layer"):
        if "{layer}" not in getattr(table, name):
            yield f".table.{name} is {getattr(table, name)!r}, expected {{layer}} in it, for the number; add it"
    if not table.embedding:
        yield ".table.embedding is empty, expected the word embedding as its first entry; add it"


def _wrong_fields(part: Any, path: str) -> Iterator[str]:
    """Fields with values of another type than declared, in a part of a family and in the parts inside it."""
    for name, hint in get_type_hints(type(part)).items():
        value = getattr(part, name)
        if problem := _misfit(value, hint):
            yield f"{path}.{name}{problem}; correct it"
        inside = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) is tuple else ()
        for key, inner in [(None, value), *inside]:
            if is_dataclass(inner) or isinstance(inner, Place):
                yield from _wrong_fields(inner, f"{path}.{name}" + ("" if key is None else f"[{key!r}]"))


@lru_cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _misfit(value: Any, hint: Any) -> str:
    """The reason why a value is not of this type; empty if it is."""
    try:
        _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
        return f"{place} is {short(first['input'])}, {first['msg'].replace('Input should be', 'expected')}"
    return ""


# --- what config.json says ----------------------------------------------------------------------------


def _wrong_facts(family: Family) -> Iterator[str]:
    facts, hints = family.config.facts, get_type_hints(Architecture)
    for name, fact in facts.items():
        path = f".config.facts[{name!r}]"
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = _READ_APART.get(name) or (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_FIELDS)}")
            yield f"{path} is no fact of an Architecture; {hint}"
        value = fact.default if isinstance(fact, ConfigField) else fact
        if value is not REQUIRED and not callable(value) and (problem := _misfit(value, hints[name])):
            yield f"{path}{'.default' if isinstance(fact, ConfigField) else ''}{problem}; correct it"
    missing = [name for name, field in _FIELDS.items() if field.default is MISSING and name not in facts]
    if missing:
        yield (
            f".config.facts has no {', '.join(missing)}, which every Architecture has; add what config.json says of "
            "it, or a value"
        )
    yield from _failing_facts(facts)


def _failing_facts(facts: Mapping[str, Any]) -> Iterator[str]:
    sample: dict[str, Any] = {}
    for name, fact in facts.items():
        function = fact.default if isinstance(fact, ConfigField) else fact
        if callable(function) and function is not REQUIRED:
            try:
                function(sample)
            except ValueError:  # it refuses a model, as it may
                pass
            except Exception as error:  # noqa: BLE001 - it is the user's code
                yield (
                    f".config.facts[{name!r}]: its function fails on the facts before it ({', '.join(sample)}): "
                    f"{describe_error(error)}; correct it, or the order"
                )
        sample[name] = _sample_of(name, fact)


def _sample_of(name: str, fact: Any) -> Any:
    if isinstance(fact, ConfigField) or callable(fact):
        return _SAMPLE.get(name, _FIELDS[name].default)
    return fact


def _sample(family: Family) -> Architecture:
    """A small model of the family."""
    facts = {name: _sample_of(name, fact) for name, fact in family.config.facts.items()}
    return Architecture(model_type=family.model_type, **facts, rope_theta=10000.0, rope_scaling=None)


# --- the table ----------------------------------------------------------------------------------------


def _entries(table: Table) -> Iterator[tuple[str, Entry]]:
    """Every entry with its place in the family."""
    for block in ("embedding", "layer", "final"):
        yield from ((f".table.{block}[{number}]", entry) for number, entry in enumerate(getattr(table, block)))
    yield from ((f".table.{name}", getattr(table, name)) for name in ("lm_head", "scalar_head"))


def _places(entry: Entry) -> Iterator[tuple[str, Place]]:
    """Every place of an entry with its name there."""
    yield "megatron", entry.megatron
    yield from ((f"grouped[{spec!r}]", place) for spec, place in entry.grouped.items())
    if entry.vllm is not None:
        yield "vllm", entry.vllm


_NAMES: Mapping[str, Callable[[Entry], list[str]]] = {
    "Hugging Face": lambda entry: [name for name, _ in entry.tensors],
    "Megatron": lambda entry: [entry.megatron.name],
    "Megatron, with transformer-engine": lambda entry: [entry.te_name or entry.megatron.name],
    "vLLM": lambda entry: [] if entry.vllm is None else [entry.vllm.name],
}
"""System -> the names that an entry has there."""


def _wrong_names(family: Family) -> Iterator[str]:
    for path, entry in _entries(family.table):
        for name, _ in entry.tensors:
            if ("{expert}" in name) != entry.per_expert:
                expected = "{expert} in it" if entry.per_expert else "no {expert} in it, as per_expert is not set"
                yield f"{path}: the tensor {name!r}, expected {expected}; correct one of the two"
    for (path, entry), (other_path, other) in combinations(_entries(family.table), 2):
        if not _may_meet(path, entry, other_path, other):
            continue
        for system, names in _NAMES.items():
            if both := set(names(entry)) & set(names(other)):
                yield f"{path} and {other_path} both have {both.pop()!r} ({system}); leave one out, or correct its name"


def _may_meet(path: str, entry: Entry, other_path: str, other: Entry) -> bool:
    """Whether two entries stand in one model, with names of one kind."""
    in_layer = [name.startswith(".table.layer") for name in (path, other_path)]
    heads = [name.endswith("_head") for name in (path, other_path)]
    if in_layer[0] != in_layer[1] or all(heads):
        return False
    if entry.layers is not None and other.layers is not None and not entry.layers & other.layers:
        return False
    return entry.when is other.when or always in (entry.when, other.when)


def _wrong_shapes(family: Family) -> Iterator[str]:
    words = dimensions(_sample(family))
    for path, entry in _entries(family.table):
        if not entry.tensors:
            yield f"{path}.tensors is empty, expected names and shapes; add them, or leave the entry out"
        for name, shape in entry.tensors:
            unknown = next((word for word in shape if word not in words), None)
            if unknown is not None:
                yield f"{path}: the shape of {name!r} has {unknown!r}, expected words of {', '.join(words)}; use these"
            if empty := next((word for word in shape if not words.get(word, 1)), None):
                yield (
                    f"{path}: the shape of {name!r} has {empty!r}, which config.facts does not state; add its fact "
                    "(experts: num_experts, expert_ffn_size)"
                )


def _wrong_rules(family: Family) -> Iterator[str]:
    """Rules that cannot be followed, or lose a part of a tensor, on one rank."""
    arch = _sample(family)
    dims, experts = dimensions(arch), range(arch.num_experts)
    rank = TPRank(arch=arch, tp=1, tp_rank=0, padded_vocab=arch.vocab_size, experts=experts)
    for path, entry in _entries(family.table):
        tensors = logical_tensors_of(entry, dims, expert=0 if entry.per_expert else None)
        shapes = " and ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
        total = sum(math.prod(tensor.shape) for tensor in tensors)
        for system, place in _places(entry):
            try:
                held = sum(math.prod(p.box.shape) for p in place.rule(tensors, rank).placements(place.name))
            except Exception as error:  # noqa: BLE001 - rules may be the user's code
                yield f"{path}.{system}: its rule fails on {shapes}: {describe_error(error)}; choose another rule"
            else:
                if held != total:
                    yield f"{path}.{system}: its rule puts {held} of {total} elements of {shapes} there; choose another"
        try:
            entry.when(arch)
        except Exception as error:  # noqa: BLE001 - as above
            yield f"{path}.when fails: {describe_error(error)}; correct it"
