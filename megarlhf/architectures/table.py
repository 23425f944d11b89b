"""Entries of an architecture's table, and how a table becomes placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.config_spec import ConfigSpec
from megarlhf.architectures.shards import LogicalTensor, Shard
from megarlhf.placement import Placement, RankPlacements, Shape

Head = Literal["lm", "scalar"]
Spec = Literal["local", "te"]
Experts = Literal["each", "grouped"]
"""How Megatron stores experts: `local_experts.j.*` each; or grouped, which is `linear_fc1.weight{j}` under the
transformer-engine spec and one `weight1` [experts, hidden, ffn] under the local one."""
Init = Literal["normal", "residual", "ones", "zeros", "score", "lora"]
"""How a fresh tensor starts; residual is normal with std / sqrt(2 num_layers), lora uniform by its columns."""


@dataclass(frozen=True, kw_only=True)
class TPRank:
    """One tensor-parallel rank of a model."""

    arch: Architecture
    tp: int
    tp_rank: int
    padded_vocab: int
    experts: range = range(0)
    """Experts that the rank holds."""


def always(arch: Architecture) -> bool:
    """The condition of an entry that every model of the family has."""
    return True


Rule = Callable[[Sequence[LogicalTensor], TPRank], Shard]
"""How a system puts the tensors of an entry into its one storage on one rank."""


Stack = Callable[[Sequence[Shard]], Shard]
"""How it puts the shards of all experts of a rank into one storage."""
Tensors = tuple[tuple[str, tuple[str, ...]], ...]
"""(Hugging Face name, shape in the words of `dimensions`)."""


class Place(NamedTuple):
    """A system's storage of an entry. In a layer's entry the name is relative to the layer."""

    name: str
    """Name of the tensor. In an entry per expert, `{expert}` stands for the index among the rank's experts, or `stack`
    is set."""
    rule: Rule
    stack: Stack | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Logical tensors that share a storage in Megatron or vLLM, and how each system stores them.

    Names in a layer's entry are relative to the layer.
    """

    tensors: Tensors
    init: Init
    megatron: Place
    vllm: Place | None
    """vLLM's place. None: its model has no such parameter, and a model that has the tensor is refused."""
    te_name: str | None = None
    """Megatron's name under the transformer-engine spec, where it differs."""
    per_expert: bool = False
    """Whether each expert has it; the expert's index replaces `{expert}` in the names."""
    grouped: Mapping[Spec, Place] = field(default_factory=dict)
    """Where Megatron keeps it with grouped experts."""
    when: Callable[[Architecture], bool] = always
    layers: frozenset[int] | None = None
    """Decoder layers that have it; None: all."""

    def is_in(self, layer: int) -> bool:
        """Whether this decoder layer has it, where the model has it at all."""
        return self.layers is None or layer in self.layers

    def megatron_place(self, spec: Spec, experts: Experts) -> Place:
        if experts == "grouped" and self.grouped:
            return self.grouped[spec]
        return self.megatron._replace(name=self.te_name) if spec == "te" and self.te_name else self.megatron


@dataclass(frozen=True, kw_only=True)
class Table:
    """One architecture: every logical tensor it has and where Megatron and vLLM keep it."""

    embedding: tuple[Entry, ...]
    """The first entry is the word embedding."""
    layer: tuple[Entry, ...]
    final: tuple[Entry, ...]
    lm_head: Entry
    scalar_head: Entry
    hf_prefix: str = "model."
    """Prefix that names lack in a save of the bare trunk, and in older files."""
    hf_ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names of buffers that older files store and that are computed, not learnt."""
    hf_layer: str = "model.layers.{layer}."
    megatron_layer: str = "decoder.layers.{layer}."
    vllm_layer: str = "model.layers.{layer}."

    def head(self, arch: Architecture, head: Head) -> Entry:
        """The head's entry; a tied head is one more placement of the embedding."""
        if head == "scalar":
            return self.scalar_head
        return replace(self.lm_head, tensors=self.embedding[0].tensors) if arch.tied_embeddings else self.lm_head


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of one `model_type`: how its config.json is read, and where its tensors are."""

    model_type: str
    config: ConfigSpec
    table: Table


def dimensions(arch: Architecture) -> dict[str, int]:
    """The words in which entries state shapes."""
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return {
        "one": 1,
        "vocab": arch.vocab_size,
        "positions": arch.max_positions + arch.position_offset,
        "hidden": arch.hidden_size,
        "head": arch.head_dim,
        "q": queries,
        "kv": keys,
        "qkv": queries + 2 * keys,
        "ffn": arch.ffn_size,
        "gate_up": 2 * arch.ffn_size,
        "experts": arch.num_experts,
        "expert_ffn": arch.expert_ffn_size,
        "lora_rank": 0 if arch.adapter is None else arch.adapter.rank,
    }


def logical_tensors_of(
    entry: Entry, dims: Mapping[str, int], prefix: str = "", expert: int | None = None
) -> tuple[LogicalTensor, ...]:
    """The entry's tensors, those of one expert if it is an entry per expert; `dims` as `dimensions` says."""
    return tuple(
        LogicalTensor(
            prefix + (name if expert is None else name.format(expert=expert)), tuple(dims[word] for word in shape)
        )
        for name, shape in entry.tensors
    )


def iter_tensors(table: Table, arch: Architecture, head: Head) -> Iterator[tuple[LogicalTensor, Entry]]:
    """Every logical tensor once, with its entry, in the model's order; a tied head adds none."""
    dims = dimensions(arch)
    heads = () if head == "lm" and arch.tied_embeddings else (table.head(arch, head),)
    blocks = [("", table.embedding)]
    for layer in range(arch.num_layers):
        entries = tuple(entry for entry in table.layer if entry.is_in(layer))
        blocks.append((table.hf_layer.format(layer=layer), entries))
    blocks += [("", table.final), ("", heads)]
    for prefix, entries in blocks:
        for entry in entries:
            if entry.when(arch):
                for expert in range(arch.num_experts) if entry.per_expert else (None,):
                    for tensor in logical_tensors_of(entry, dims, prefix, expert):
                        yield tensor, entry


@dataclass(frozen=True, slots=True)
class _EntryStorage:
    """One storage of an entry, without the names of its layer."""

    name: str
    shape: Shape
    placements: tuple[Placement, ...]
    tensors: dict[str, Shape]


class PlacementBuilder:
    """Collects one rank's storages; the only mutable thing here."""

    def __init__(self, rank: TPRank) -> None:
        self.rank = rank
        self.dims = dimensions(rank.arch)
        self.storages: dict[str, Shape] = {}
        self.tensors: dict[str, Shape] = {}
        self.placements: list[Placement] = []
        self._cache: dict[int, tuple[Entry, Place, list[_EntryStorage]]] = {}

    def add(self, entry: Entry, place: Place, prefix: str = "", hf_prefix: str = "") -> None:
        """Adds the entry's storage, or one per expert, if this model has it."""
        if not entry.when(self.rank.arch):
            return
        for part in self._storages_of(entry, place):
            storage = prefix + part.name
            if storage in self.storages:
                raise ValueError(
                    f"the table of model_type {self.rank.arch.model_type} has the storage {storage} twice in one "
                    "model; correct the names or conditions (`when`) of its entries"
                )
            self.storages[storage] = part.shape
            self.placements += [
                Placement(hf_prefix + p.tensor, p.box, storage, p.offset, p.strides) for p in part.placements
            ]
            self.tensors.update({hf_prefix + name: shape for name, shape in part.tensors.items()})

    def build(self, rank: int) -> RankPlacements:
        return RankPlacements(rank, self.storages, tuple(self.placements), self.tensors)

    def _storages_of(self, entry: Entry, place: Place) -> list[_EntryStorage]:
        """The entry's storages: the same in every layer, hence made once."""
        cached = self._cache.get(id(entry))
        if cached is None or cached[1] is not place:
            self._cache[id(entry)] = cached = (entry, place, list(self._make(entry, place)))
        return cached[2]

    def _make(self, entry: Entry, place: Place) -> Iterator[_EntryStorage]:
        if not entry.per_expert:
            tensors = logical_tensors_of(entry, self.dims)
            yield _entry_storage(place.name, place.rule(tensors, self.rank), tensors)
            return
        tensors_of = [logical_tensors_of(entry, self.dims, expert=expert) for expert in self.rank.experts]
        shards = [place.rule(tensors, self.rank) for tensors in tensors_of]
        if place.stack is not None:
            all_tensors = [tensor for tensors in tensors_of for tensor in tensors]
            yield _entry_storage(place.name, place.stack(shards), all_tensors)
            return
        for index, (shard, tensors) in enumerate(zip(shards, tensors_of, strict=True)):
            yield _entry_storage(place.name.format(expert=index), shard, tensors)


def _entry_storage(name: str, shard: Shard, tensors: Sequence[LogicalTensor]) -> _EntryStorage:
    names = {segment.tensor for segment in shard.segments}
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.name in names}
    return _EntryStorage(name, shard.declared, shard.placements(name), shapes)
