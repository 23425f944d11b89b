"""What a table of an architecture consists of, and the one walk that turns a table into placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarlhf.weights.architecture import Architecture
from megarlhf.weights.placement import Placement, RankPlacements, Shape
from megarlhf.weights.tensor_map.layouts import Layout, Logical

Head = Literal["lm", "scalar"]
Spec = Literal["local", "te"]
Experts = Literal["each", "grouped"]
"""How Megatron stores experts: `local_experts.j.*` each; or grouped, which is `linear_fc1.weight{j}` under the
transformer-engine spec and one `weight1` [experts, hidden, ffn] under the local one."""
Init = Literal["normal", "residual", "ones", "zeros", "score"]
"""How a fresh tensor starts; residual is normal with std / sqrt(2 num_layers)."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor-parallel rank of a model."""

    arch: Architecture
    tp: int
    tp_rank: int
    padded_vocab: int
    ep: int = 1
    ep_rank: int = 0


Rule = Callable[[Sequence[Logical], Slot], Layout]
"""How a system puts the tensors of an entry into its one storage on one rank."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Logical tensors that share a storage in Megatron or vLLM, and how each system stores them.

    Names in a layer's entry are relative to the layer.
    """

    tensors: tuple[tuple[str, tuple[str, ...]], ...]
    """(Hugging Face name, shape in the words of `dimensions`)."""
    init: Init
    megatron: tuple[str, Rule]
    vllm: tuple[str, Rule]
    te_name: str | None = None
    """Megatron's name under the transformer-engine spec, where it differs."""
    when: Callable[[Architecture], bool] = lambda arch: True

    def megatron_name(self, spec: Spec) -> str:
        return self.te_name if spec == "te" and self.te_name else self.megatron[0]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One architecture: every logical tensor it has and where Megatron and vLLM keep it."""

    embedding: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    final: tuple[Entry, ...]
    lm_head: Entry
    scalar_head: Entry
    hf_layer: str = "model.layers.{layer}."
    megatron_layer: str = "decoder.layers.{layer}."
    vllm_layer: str = "model.layers.{layer}."

    def head(self, arch: Architecture, head: Head) -> Entry:
        """The head's entry; a tied head is one more placement of the embedding."""
        if head == "scalar":
            return self.scalar_head
        return replace(self.lm_head, tensors=self.embedding[0].tensors) if arch.tied_embeddings else self.lm_head


def dimensions(arch: Architecture) -> dict[str, int]:
    """The words in which entries state shapes."""
    return {
        "one": 1,
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "q": arch.num_heads * arch.head_dim,
        "kv": arch.num_kv_heads * arch.head_dim,
        "ffn": arch.ffn_size,
    }


def logicals(entry: Entry, arch: Architecture, prefix: str = "") -> tuple[Logical, ...]:
    dims = dimensions(arch)
    return tuple(Logical(prefix + name, tuple(dims[word] for word in shape)) for name, shape in entry.tensors)


def walk(table: Table, arch: Architecture, head: Head) -> Iterator[tuple[Logical, Entry]]:
    """Every logical tensor once, with its entry, in the model's order; a tied head adds none."""
    heads = () if head == "lm" and arch.tied_embeddings else (table.head(arch, head),)
    blocks = [("", table.embedding)]
    blocks += [(table.hf_layer.format(layer=layer), table.layer) for layer in range(arch.num_layers)]
    blocks += [("", table.final), ("", heads)]
    for prefix, entries in blocks:
        for entry in entries:
            if entry.when(arch):
                for tensor in logicals(entry, arch, prefix):
                    yield tensor, entry


class Gather:
    """Collects one rank's storages; the only mutable thing here."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.storages: dict[str, Shape] = {}
        self.tensors: dict[str, Shape] = {}
        self.placements: list[Placement] = []

    def add(self, entry: Entry, storage: str, rule: Rule, hf_prefix: str = "") -> None:
        """Adds the entry's storage, if this model has it."""
        if not entry.when(self.slot.arch):
            return
        tensors = logicals(entry, self.slot.arch, hf_prefix)
        layout = rule(tensors, self.slot)
        assert storage not in self.storages, f"{storage} stands twice in the table"
        self.storages[storage] = layout.shape
        self.placements += layout.placements(storage)
        held = {segment.tensor for segment in layout.segments}
        self.tensors.update({tensor.name: tensor.shape for tensor in tensors if tensor.name in held})

    def finish(self, rank: int) -> RankPlacements:
        return RankPlacements(rank, self.storages, tuple(self.placements), self.tensors)
