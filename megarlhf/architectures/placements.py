"""Logical tensors of a model, and their places on each rank in Hugging Face, Megatron and vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megarlhf.architectures.adapters import with_adapter
from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.families import family_of
from megarlhf.architectures.table import (
    Experts,
    Head,
    Init,
    PlacementBuilder,
    Spec,
    Table,
    TPRank,
    iter_tensors,
)
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides

VLLM_VOCAB_MULTIPLE = 64


def table_of(arch: Architecture) -> Table:
    """The table of the model's family, with entries for its adapter where it has one."""
    return family_of(arch.model_type).table if arch.adapter is None else with_adapter(arch)


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 128) -> int:
    """Rows of the embedding by Megatron-LM's rule: the vocabulary rounded up to a multiple of `multiple` x tp."""
    return -(-vocab_size // (multiple * tp)) * multiple * tp


def logical_tensors(arch: Architecture, head: Head = "lm") -> dict[str, Shape]:
    """Hugging Face name and full shape of every logical tensor, in the model's order.

    A tied model has no `lm_head.weight`; a scalar head has `score.weight` [1, hidden] instead.
    """
    return {tensor.name: tensor.shape for tensor, _ in iter_tensors(table_of(arch), arch, head)}


def count_elements(arch: Architecture, head: Head = "lm") -> tuple[int, int]:
    """(elements of all other tensors, elements of experts). Those of a tied head are the embedding's."""
    experts = arch.num_layers * arch.num_experts * (2 + arch.gated_mlp) * arch.hidden_size * arch.expert_ffn_size
    return sum(math.prod(shape) for shape in logical_tensors(arch, head).values()) - experts, experts


def head_name(arch: Architecture, head: Head) -> str:
    """Hugging Face name of the head's tensor; a tied model's files may hold the embedding under it once more."""
    table = table_of(arch)
    entry = table.lm_head if head == "lm" else table.scalar_head
    return entry.tensors[0][0]


def tensor_inits(arch: Architecture, head: Head = "lm") -> dict[str, Init]:
    """How each logical tensor starts when drawn at random."""
    return {tensor.name: entry.init for tensor, entry in iter_tensors(table_of(arch), arch, head)}


def identity_placements(tensors: dict[str, Shape], rank: int = 0) -> RankPlacements:
    """Each logical tensor as a storage of its own name and shape, all on one rank."""
    placements = tuple(
        Placement(name, Box.whole(shape), name, 0, contiguous_strides(shape)) for name, shape in tensors.items()
    )
    return RankPlacements(rank, dict(tensors), placements, dict(tensors))


def hf_placements(arch: Architecture, head: Head = "lm", rank: int = 0) -> RankPlacements:
    """A Hugging Face checkpoint: the logical tensors themselves."""
    return identity_placements(logical_tensors(arch, head), rank)


def megatron_placements(
    arch: Architecture,
    *,
    tp: int,
    tp_rank: int,
    layers: Sequence[int],
    first_stage: bool,
    last_stage: bool,
    padded_vocab: int,
    rank: int,
    head: Head = "lm",
    spec: Spec = "local",
    experts: Experts = "each",
    ep: int = 1,
    ep_rank: int = 0,
) -> RankPlacements:
    """One model chunk of a Megatron-Core GPTModel, by the names of `model.named_parameters()`.

    `layers` are the global indices of the chunk's layers in local order, so uneven stages and virtual stages
    need nothing more (merge the chunks of a rank with `prefixed` and `merge_ranks`). A tied head is absent
    when the chunk holds the embedding too, else a further placement of the embedding. Experts are split over ep
    in contiguous shares, and inside an expert over tp.

    Raises: ValueError when tp does not divide what it splits, when ep does not divide the experts, or when a
    layer is out of range.
    """
    table = table_of(arch)
    _check_layers(arch, layers)
    builder = PlacementBuilder(_tensor_parallel_rank(arch, tp, tp_rank, padded_vocab, ep, ep_rank))
    if first_stage:
        for entry in table.embedding:
            builder.add(entry, entry.megatron)
    for local, layer in enumerate(layers):
        prefix, hf_prefix = table.megatron_layer.format(layer=local), table.hf_layer.format(layer=layer)
        for entry in table.layer:
            if entry.is_in(layer):
                builder.add(entry, entry.megatron_place(spec, experts), prefix, hf_prefix)
    if last_stage:
        for entry in table.final:
            builder.add(entry, entry.megatron)
        shared = first_stage and arch.tied_embeddings and head == "lm"
        if not shared:
            entry = table.head(arch, head)
            builder.add(entry, entry.megatron)
    return builder.build(rank)


def vllm_placements(
    arch: Architecture, *, tp: int, tp_rank: int, rank: int, padded_vocab: int | None = None
) -> RankPlacements:
    """One tensor-parallel rank of vLLM's model (pipeline size 1), by the names of `named_parameters()`.

    `padded_vocab` defaults to vLLM's own rule: a multiple of 64, then split. Storages of a tied head are
    absent, since vLLM shares the parameter. Experts are all on every rank, each split over tp. An adapter is merged
    into the weights that vLLM gets, and has no place of its own here.

    Raises: ValueError when tp does not divide the query heads, the MLP or the padded vocabulary, or when vLLM's
    model lacks a parameter.
    """
    arch = arch.base
    table = table_of(arch)
    if padded_vocab is None:
        padded_vocab = padded_vocab_size(arch.vocab_size, 1, VLLM_VOCAB_MULTIPLE)
    builder = PlacementBuilder(_tensor_parallel_rank(arch, tp, tp_rank, padded_vocab))
    heads = () if arch.tied_embeddings else (table.lm_head,)
    blocks = [("", "", table.embedding)]
    for layer in range(arch.num_layers):
        blocks.append((table.vllm_layer.format(layer=layer), table.hf_layer.format(layer=layer), table.layer))
    blocks += [("", "", table.final), ("", "", heads)]
    for prefix, hf_prefix, entries in blocks:
        for entry in entries:
            if entry.vllm is not None:
                builder.add(entry, entry.vllm, prefix, hf_prefix)
            elif entry.when(arch):
                raise ValueError(
                    f"vLLM's {arch.model_type} has no parameter for {hf_prefix}{entry.tensors[0][0]}; sample with "
                    "the Megatron engine"
                )
    return builder.build(rank)


def canonical_names(file_names: Iterable[str], arch: Architecture, head: Head = "lm") -> dict[str, str]:
    """Logical tensor's name -> the name under which a Hugging Face file stores it.

    Files may leave out the table's prefix (`h.0.ln_1.weight` for `transformer.h.0.ln_1.weight`). Names that are no
    tensor of the model stand for themselves, so that the caller sees them; buffers that old files store are left out.

    Raises: ValueError when two stored names mean the same tensor.
    """
    table = table_of(arch)
    logical = logical_tensors(arch, head).keys()
    names: dict[str, str] = {}
    for name in file_names:
        canonical = next((n for n in (name, table.hf_prefix + name) if n in logical), None)
        if canonical is None:
            if name.endswith(table.hf_ignored):
                continue
            canonical = name
        if canonical in names:
            raise ValueError(
                f"{names[canonical]} and {name} are both {canonical}; the files mix two checkpoints: keep those of one"
            )
        names[canonical] = name
    return names


def _tensor_parallel_rank(
    arch: Architecture, tp: int, tp_rank: int, padded_vocab: int, ep: int = 1, ep_rank: int = 0
) -> TPRank:
    for axis, rank, size in (("tp", tp_rank, tp), ("ep", ep_rank, ep)):
        if not 0 <= rank < size:
            raise ValueError(
                f"{axis}_rank = {rank} is outside 0..{size - 1} ({axis} = {size}); pass the rank inside its group"
            )
    if ep > 1 and not arch.num_experts:
        raise ValueError(f"ep = {ep} on a {arch.model_type} without experts; leave ep at 1")
    if arch.num_experts % ep:
        raise ValueError(f"ep = {ep} does not divide the {arch.num_experts} experts; choose a divisor of them")
    share = arch.num_experts // ep
    return TPRank(
        arch=arch,
        tp=tp,
        tp_rank=tp_rank,
        padded_vocab=padded_vocab,
        experts=range(ep_rank * share, (ep_rank + 1) * share),
    )


def _check_layers(arch: Architecture, layers: Sequence[int]) -> None:
    outside = [layer for layer in layers if not 0 <= layer < arch.num_layers]
    if outside or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers = {list(layers)}: expected distinct indices in 0..{arch.num_layers - 1}; "
            "pass global layer indices (layer_number - 1)"
        )
