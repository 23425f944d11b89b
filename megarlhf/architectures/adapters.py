"""Entries of a LoRA adapter, made from those of the linear layers that it adapts.

Each linear layer that Hugging Face names has its own A and B, also where Megatron keeps several in one storage (q, k
and v; gate and up). Their A stand one below the other in one storage; their B stand in another, whose rows are those of
the layer's own weight. So wherever a row of W is, the row of B that adds to it is; wherever a column of W is, the
column of A is. What W does not share out is whole on every tensor-parallel rank.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from megarlhf.architectures.architecture import Adapter, AdapterTarget, Architecture
from megarlhf.architectures.families import family_of
from megarlhf.architectures.shards import LogicalTensor, Shard, StorageSegment
from megarlhf.architectures.table import Entry, Place, Rule, Table, TPRank, dimensions, iter_tensors
from megarlhf.placement import Box

ALL_LINEAR = "all-linear"
A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the logical tensors' names, behind the name of the linear layer; PEFT's."""
LIVE = ".lora."
"""Between the name of Megatron's layer and A or B."""
WEIGHT = ".weight"
_LINEAR = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
EXPERT = "{expert}"
"""Placeholder for an expert's number in the name of a module."""


@lru_cache(maxsize=16)
def with_adapter(arch: Architecture) -> Table:
    """The table of a model with an adapter: A and B behind the weight that they add to."""
    table = family_of(arch.model_type).table
    layer: list[Entry] = []
    for entry in table.layer:
        layer.append(entry)
        if is_linear(entry, arch):
            layer += _adapter_entries(entry, arch)
    return replace(table, layer=tuple(layer))


def is_linear(entry: Entry, arch: Architecture) -> bool:
    """Whether the entry is the weight of a linear layer, or of several in one, that may have an adapter."""
    return entry.when(arch) and entry.megatron.name.endswith(_LINEAR)


def modules_of(entry: Entry) -> list[str]:
    """Names of an entry's linear layers inside a decoder layer, as Hugging Face has them."""
    return [name.removesuffix(WEIGHT) for name, _ in entry.tensors]


def find_adapter(arch: Architecture, patterns: Sequence[str], *, rank: int, alpha: float, rslora: bool) -> Adapter:
    """The adapter on the linear layers that any of `patterns` names: `all-linear`; the end of a module's name, as PEFT
    reads it (`q_proj`, `self_attn.q_proj`); or a pattern with `*`, `?` or `[...]` (`model.layers.1?.mlp.*`).

    Raises: ValueError for one that names no linear layer, or some of a layer's experts only.
    """
    names = linear_modules(arch)
    for pattern in patterns:
        if not any(_matches(name, pattern, arch) for _, _, name in names):
            raise ValueError(
                f"targets: {pattern!r} names no linear layer of this model; it has {', '.join(_ends(names))} in each "
                f"of its layers (such as {names[0][2].replace(EXPERT, '0')}); {ALL_LINEAR!r} is all of them. "
                "Embedding, head, router and norms have no adapter"
            )
    layers: dict[str, list[int]] = {}
    for layer, module, name in names:
        if any(_matches(name, pattern, arch) for pattern in patterns):
            layers.setdefault(module, []).append(layer)
    return adapter_on(arch, layers, rank=rank, alpha=alpha, rslora=rslora)


def adapter_on(arch: Architecture, layers: dict[str, list[int]], *, rank: int, alpha: float, rslora: bool) -> Adapter:
    """An adapter on modules, each in its decoder layers. Targets have the order of the model's table."""
    everywhere = list(range(arch.num_layers))
    targets = [
        AdapterTarget(module=module, layers=None if layers[module] == everywhere else tuple(layers[module]))
        for module in dict.fromkeys(module for _, module, _ in linear_modules(arch))
        if module in layers
    ]
    return Adapter(rank=rank, alpha=alpha, rslora=rslora, targets=tuple(targets))


def linear_modules(arch: Architecture) -> list[tuple[int, str, str]]:
    """(decoder layer number, name inside the layer, full name) of every linear layer that may have an adapter. Experts
    appear once, with `{expert}` for their number."""
    table = family_of(arch.model_type).table
    modules = [module for entry in table.layer if is_linear(entry, arch) for module in modules_of(entry)]
    return [
        (layer, module, table.hf_layer.format(layer=layer) + module)
        for layer in range(arch.num_layers)
        for module in modules
    ]


def is_adapter_tensor(name: str) -> bool:
    """Whether a logical tensor is an A or a B."""
    return name.endswith((A, B))


@lru_cache(maxsize=16)
def adapter_tensors(arch: Architecture) -> frozenset[str]:
    """All logical tensors of the adapter."""
    if arch.adapter is None:
        return frozenset()
    names = (tensor.name for tensor, _ in iter_tensors(with_adapter(arch), arch, "lm"))
    return frozenset(name for name in names if is_adapter_tensor(name))


def name_matches(name: str, pattern: str) -> bool:
    """Whether a pattern names it: from its beginning, or from behind any dot of it."""
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
    return name == pattern or name.endswith(f".{pattern}")


def _matches(name: str, pattern: str, arch: Architecture) -> bool:
    if pattern == ALL_LINEAR:
        return True
    if EXPERT not in name:
        return name_matches(name, pattern)
    matches = {name_matches(name.replace(EXPERT, str(expert)), pattern) for expert in range(arch.num_experts)}
    if len(matches) == 2:
        raise ValueError(
            f"targets: {pattern!r} names some of the experts only; an adapter is on all experts of a layer or on none: "
            f"write * for their number ({name.replace(EXPERT, '*')})"
        )
    return matches.pop()


def _ends(names: Sequence[tuple[int, str, str]]) -> list[str]:
    return list(dict.fromkeys(re.sub(r".*\.", "", module) for _, module, _ in names))


def _adapter_entries(entry: Entry, arch: Architecture) -> Iterator[Entry]:
    """A and B of the entry's linear layers; more than two where not every decoder layer has the same of them."""
    assert arch.adapter is not None
    modules = modules_of(entry)
    wanted = {target.module: target.layers for target in arch.adapter.targets if target.module in modules}
    by_targets: dict[tuple[int, ...], set[int]] = {}
    for layer in range(arch.num_layers):
        here = tuple(
            n
            for n, module in enumerate(modules)
            if module in wanted and (wanted[module] is None or layer in (wanted[module] or ()))
        )
        if here:
            by_targets.setdefault(here, set()).add(layer)
    for numbers, layers in by_targets.items():
        yield from _pair(entry, numbers, arch, frozenset(layers))


def _pair(entry: Entry, numbers: tuple[int, ...], arch: Architecture, layers: frozenset[int]) -> tuple[Entry, Entry]:
    """A and B of those of the entry's linear layers that have these numbers."""
    modules = modules_of(entry)
    undivided = _base_shard(entry, TPRank(arch=arch.base, tp=1, tp_rank=0, padded_vocab=arch.vocab_size))
    transposed = undivided.segments[0].dims[0] == 1
    pairs = []
    for letter, end, init, rule in (("A", A, "lora", _rule_a(entry)), ("B", B, "zeros", _rule_b(entry, numbers))):
        tensors = []
        for n in numbers:
            words = entry.tensors[n][1][::-1] if transposed else entry.tensors[n][1]
            tensors.append((modules[n] + end, ("lora_rank", words[1]) if letter == "A" else (words[0], "lora_rank")))
        name = entry.megatron.name.removesuffix(WEIGHT) + LIVE + letter
        pairs.append(
            Entry(
                tensors=tuple(tensors),
                init=init,  # type: ignore[arg-type]
                megatron=Place(name, rule),
                vllm=None,
                per_expert=entry.per_expert,
                grouped={
                    spec: Place(_grouped_name(place.name, name, letter), rule) for spec, place in entry.grouped.items()
                },
                layers=layers,
            )
        )
    return pairs[0], pairs[1]


def _grouped_name(of_weight: str, alone: str, letter: str) -> str:
    """`mlp.experts.linear_fc1.lora.{expert}.A` for `mlp.experts.linear_fc1.weight{expert}`."""
    base, weight, expert = of_weight.partition(f"{WEIGHT}{EXPERT}")
    return f"{base}{LIVE}{EXPERT}.{letter}" if weight and not expert else alone


def _base_shard(entry: Entry, rank: TPRank) -> Shard:
    """The weight's storage on a rank, its tensors named by their numbers."""
    dims = dimensions(rank.arch)
    tensors = [LogicalTensor(str(n), tuple(dims[word] for word in shape)) for n, (_, shape) in enumerate(entry.tensors)]
    return entry.megatron.rule(tensors, rank)


def _rule_a(entry: Entry) -> Rule:
    """The A one below the other, of the columns that the weight has."""

    def rule(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
        base = _base_shard(entry, rank)
        columns = base.shape[1]
        start = 0
        if columns != tensors[0].shape[1]:  # a row-parallel layer: its one tensor is there on every rank
            segment = base.segments[0]
            start = segment.box.start[segment.dims.index(1)]
        height = tensors[0].shape[0]
        segments = tuple(
            StorageSegment(tensor.name, Box((0, start), (height, start + columns)), (n * height, 0), (0, 1))
            for n, tensor in enumerate(tensors)
        )
        return Shard((len(tensors) * height, columns), segments)

    return rule


def _rule_b(entry: Entry, numbers: Collection[int]) -> Rule:
    """Row for row as the weight; rows of layers without an adapter are padding."""
    position = {str(number): place for place, number in enumerate(numbers)}

    def rule(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
        base, width = _base_shard(entry, rank), tensors[0].shape[1]
        segments = []
        for segment in base.segments:
            if segment.tensor in position:
                dim = segment.dims.index(0)
                box = Box((segment.box.start[dim], 0), (segment.box.stop[dim], width))
                segments.append(StorageSegment(tensors[position[segment.tensor]].name, box, (segment.at[0], 0), (0, 1)))
        return Shard((base.shape[0], width), tuple(segments))

    return rule
