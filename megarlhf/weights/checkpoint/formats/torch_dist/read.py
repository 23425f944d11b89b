"""Megatron-Core's `torch_dist` distributed checkpoints, read without Megatron and without a process group.

Of a checkpoint saved at any layout, in any form of keys and with either spec's norm names, the reader makes one
part: each chunk that some rank saved is a storage, and the tensor map, cut along the chunks, says which boxes
of the logical tensors are in it. Optimizer state, `_extra_state` and random states are passed over. Tensors'
bytes are never read. `write.py` is the other direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, megatron_placements
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.torch_dist.keys import (
    GlobalSlice,
    KeyForm,
    StorageName,
    chunk_name,
    cut,
    global_slices,
    is_gated,
    key_form,
)
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import (
    BlobReader,
    Chunk,
    GlobalTensor,
    check_config,
    read_common,
    read_tensors,
    require_apart,
)
from megarlhf.weights.transport.extent import CheckpointWeights

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_OPTIMIZER = ("optimizer.", "chained_")


@dataclass(frozen=True)
class TorchDistCheckpoint(CheckpointWeights):
    """An opened checkpoint: one part, whose storages are the chunks of the model's tensors."""

    args: dict[str, Any]
    """Of the saving run."""
    iteration: int | None
    padded_vocab: int
    """Rows of the word embedding, whatever its layout padded them for."""
    head: Head
    form: KeyForm


def model_tensors(tensors: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    """Those that are not optimizer state."""
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(_OPTIMIZER)}


def read_torch_dist(directory: str | PathLike[str], arch: Architecture) -> TorchDistCheckpoint:
    """Opens one iteration's directory: headers only.

    A model without a scalar head whose last layer is `output_layer.weight` [1, hidden] is taken for one with it.

    Raises: ValueError that lists every missing, extra or wrongly shaped tensor; or says that a file is missing,
    truncated, damaged, or names a class that is not on the allow-list.
    """
    directory = Path(directory)
    check_config(directory)
    common = read_common(directory)
    tensors = model_tensors(read_tensors(directory))
    require_apart(directory, tensors.values())
    if EMBEDDING not in tensors:
        raise ValueError(
            f"{directory} has no {EMBEDDING} among its {len(tensors)} tensors; give the checkpoint of a GPTModel"
        )
    padded_vocab = tensors[EMBEDDING].shape[0]
    head: Head = "scalar" if OUTPUT in tensors and tensors[OUTPUT].shape[0] == 1 else "lm"
    form = key_form(tensors)
    whole = megatron_placements(
        arch,
        tp=1,
        tp_rank=0,
        layers=range(arch.num_layers),
        first_stage=True,
        last_stage=True,
        padded_vocab=padded_vocab,
        rank=0,
        head=head,
        spec="te",
    )
    slices = _slices_by_storage(directory, whole, tensors, form, arch)
    part, chunks = _cut_along_chunks(whole, slices, tensors)
    extents = BlobReader().extents({name: (chunk, tensors[key].dtype) for name, (key, chunk) in chunks.items()})
    return TorchDistCheckpoint(directory, (part,), (extents,), common.args, common.iteration, padded_vocab, head, form)


def _slices_by_storage(
    directory: Path, whole: RankPlacements, tensors: Mapping[str, GlobalTensor], form: KeyForm, arch: Architecture
) -> dict[str, list[GlobalSlice]]:
    """Where each storage of the whole model stands.

    Raises: ValueError that lists all that differs.
    """
    slices_of: dict[str, list[GlobalSlice]] = {}
    used: set[str] = set()
    missing: dict[str, None] = {}
    misshapen: dict[str, str] = {}
    for storage, shape in whole.storages.items():
        name = StorageName.parse(storage)
        other = name.other_norm()
        candidates = [
            global_slices(
                candidate,
                shape,
                form,
                num_layers=arch.num_layers,
                num_experts=arch.num_experts,
                gated=is_gated(storage, arch.gated_mlp),
            )
            for candidate in ([name] if other is None else [name, other])
        ]
        slices = next((c for c in candidates if all(part.key in tensors for part in c)), None)
        if slices is None:
            missing |= {part.key: None for part in candidates[0] if part.key not in tensors}
            continue
        slices_of[storage] = slices
        for part in slices:
            used.add(part.key)
            if tensors[part.key].shape != part.shape:
                misshapen[part.key] = f"{part.key} has shape {tensors[part.key].shape}, expected {part.shape}"
    problems = [f"{key} is missing" for key in missing] + list(misshapen.values())
    problems += [f"{key} is not part of the model" for key in tensors if key not in used]
    if problems:
        raise ValueError(
            f"{directory} differs from the model's config.json in {len(problems)} tensors: {'; '.join(problems)}. "
            "Check that config.json and the checkpoint belong together"
        )
    return slices_of


def _cut_along_chunks(
    whole: RankPlacements, slices_of: Mapping[str, list[GlobalSlice]], tensors: Mapping[str, GlobalTensor]
) -> tuple[RankPlacements, dict[str, tuple[str, Chunk]]]:
    """The placements of the whole model cut along the chunks; and each chunk, with its key, by its storage's name."""
    by_storage: dict[str, list[Placement]] = {name: [] for name in whole.storages}
    for placement in whole.placements:
        by_storage[placement.storage].append(placement)
    indices: dict[str, dict[Shape, list[Chunk]]] = {}
    chunks: dict[str, tuple[str, Chunk]] = {}
    placements: list[Placement] = []
    for storage, slices in slices_of.items():
        shape = whole.storages[storage]
        for part in slices:
            if part.key not in indices:
                indices[part.key] = _by_lead(tensors[part.key], len(part.lead))
            for chunk in indices[part.key].get(part.lead, ()):
                name = chunk_name(part.key, chunk.box.start)
                chunks[name] = (part.key, chunk)
                placements += _placements_in_chunk(by_storage[storage], shape, part, chunk.box, name)
    storages = {name: chunk.box.shape for name, (_, chunk) in chunks.items()}
    return RankPlacements(0, storages, tuple(placements), whole.tensors), chunks


def _placements_in_chunk(
    placements: list[Placement], shape: Shape, part: GlobalSlice, box: Box, name: str
) -> Iterator[Placement]:
    """What a chunk, `box` of the slice's tensor, holds of a storage's placements."""
    num_lead = len(part.lead)
    strides = contiguous_strides(box.shape)
    offset = sum((i - a) * s for i, a, s in zip(part.lead, box.start, strides, strict=False))
    shift = (part.start, *(0 for _ in shape[1:]))
    local_box = Box(box.start[num_lead:], box.stop[num_lead:]).shift(shift)
    for placement in placements:
        in_chunk = cut(placement, shape, local_box, storage=name, offset=offset, strides=strides[num_lead:])
        if in_chunk is not None:
            yield in_chunk


def _by_lead(tensor: GlobalTensor, num_lead: int) -> dict[Shape, list[Chunk]]:
    """A tensor's chunks by each index along its first `num_lead` dims that they hold."""
    index: dict[Shape, list[Chunk]] = {}
    for chunk in tensor.chunks:
        leads: list[Shape] = [()]
        for a, b in zip(chunk.box.start[:num_lead], chunk.box.stop[:num_lead], strict=True):
            leads = [(*lead, i) for lead in leads for i in range(a, b)]
        for lead in leads:
            index.setdefault(lead, []).append(chunk)
    return index
