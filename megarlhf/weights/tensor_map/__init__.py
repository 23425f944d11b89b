"""Which logical tensors a model has, and where Hugging Face, Megatron and vLLM keep them on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from megarlhf.weights.architecture import Architecture
from megarlhf.weights.placement import Box, RankPlacements, Shape, place_slice
from megarlhf.weights.tensor_map.llama import LLAMA
from megarlhf.weights.tensor_map.table import Experts, Gather, Head, Init, Slot, Spec, Table, walk

VLLM_VOCAB_MULTIPLE = 64

TABLES: dict[str, Table] = {"llama": LLAMA}
"""The table of each `model_type`."""


def table_of(arch: Architecture) -> Table:
    if arch.model_type not in TABLES:
        raise ValueError(f"no table for model_type {arch.model_type!r}; known: {', '.join(sorted(TABLES))}")
    return TABLES[arch.model_type]


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 128) -> int:
    """Megatron-LM's rule: the vocabulary rounded up to a multiple of `multiple` x tp."""
    return -(-vocab_size // (multiple * tp)) * multiple * tp


def logical_tensors(arch: Architecture, head: Head = "lm") -> dict[str, Shape]:
    """Hugging Face name and full shape of every logical tensor, in the model's order.

    A tied model has no `lm_head.weight`; a scalar head has `score.weight` [1, hidden] instead.
    """
    return {tensor.name: tensor.shape for tensor, _ in walk(table_of(arch), arch, head)}


def tensor_inits(arch: Architecture, head: Head = "lm") -> dict[str, Init]:
    """How each logical tensor starts when drawn at random."""
    return {tensor.name: entry.init for tensor, entry in walk(table_of(arch), arch, head)}


def identity_placements(tensors: dict[str, Shape], rank: int = 0) -> RankPlacements:
    """Each logical tensor as a storage of its own name and shape, all on one rank."""
    placements = tuple(
        place_slice(name, Box.whole(shape), name, shape, (0,) * len(shape)) for name, shape in tensors.items()
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
    when the chunk holds the embedding too, else a further placement of the embedding.

    Raises: ValueError when tp does not divide the KV heads, the MLP or the padded vocabulary, or when a layer
    is out of range.
    """
    table = table_of(arch)
    _check_layers(arch, layers)
    gather = Gather(_slot(arch, tp, tp_rank, padded_vocab))
    if first_stage:
        for entry in table.embedding:
            gather.add(entry, *entry.megatron)
    for local, layer in enumerate(layers):
        prefix = table.megatron_layer.format(layer=local)
        for entry in table.layer:
            name = prefix + entry.megatron_name(spec)
            gather.add(entry, name, entry.megatron[1], table.hf_layer.format(layer=layer))
    if last_stage:
        for entry in table.final:
            gather.add(entry, *entry.megatron)
        shared = first_stage and arch.tied_embeddings and head == "lm"
        if not shared:
            entry = table.head(arch, head)
            gather.add(entry, *entry.megatron)
    return gather.finish(rank)


def vllm_placements(
    arch: Architecture, *, tp: int, tp_rank: int, rank: int, padded_vocab: int | None = None
) -> RankPlacements:
    """One tensor-parallel rank of vLLM's model (pipeline size 1), by the names of `named_parameters()`.

    `padded_vocab` defaults to vLLM's own rule: a multiple of 64, then split. Storages of a tied head are
    absent, since vLLM shares the parameter.

    Raises: ValueError when tp does not divide the query heads, the MLP or the padded vocabulary.
    """
    table = table_of(arch)
    if padded_vocab is None:
        padded_vocab = padded_vocab_size(arch.vocab_size, 1, VLLM_VOCAB_MULTIPLE)
    gather = Gather(_slot(arch, tp, tp_rank, padded_vocab))
    for entry in table.embedding:
        gather.add(entry, *entry.vllm)
    for layer in range(arch.num_layers):
        for entry in table.layer:
            name = table.vllm_layer.format(layer=layer) + entry.vllm[0]
            gather.add(entry, name, entry.vllm[1], table.hf_layer.format(layer=layer))
    for entry in table.final:
        gather.add(entry, *entry.vllm)
    if not arch.tied_embeddings:
        gather.add(table.lm_head, *table.lm_head.vllm)
    return gather.finish(rank)


def _slot(arch: Architecture, tp: int, tp_rank: int, padded_vocab: int) -> Slot:
    if not 0 <= tp_rank < tp:
        raise ValueError(f"tp_rank = {tp_rank} is outside 0..{tp - 1} (tp = {tp}); pass the rank inside its group")
    return Slot(arch=arch, tp=tp, tp_rank=tp_rank, padded_vocab=padded_vocab)


def _check_layers(arch: Architecture, layers: Sequence[int]) -> None:
    wrong = [layer for layer in layers if not 0 <= layer < arch.num_layers]
    if wrong or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers = {list(layers)}: expected distinct indices in 0..{arch.num_layers - 1}; "
            "pass global layer indices (layer_number - 1)"
        )
