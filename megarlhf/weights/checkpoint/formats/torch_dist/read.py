"""Megatron-Core's `torch_dist` distributed checkpoints, read without Megatron and without a process group.

Of a checkpoint saved at any layout, in any form of keys and with either spec's norm names, the reader makes one
part: each chunk that some rank saved is a storage, and the tensor map, cut along the chunks, says which boxes
of the logical tensors are in it. Optimizer state, `_extra_state` and random states are passed over. Tensors'
bytes are never read. `torch_dist_write` is the other direction.
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
    KeyForm,
    Slot,
    StorageName,
    chunk_name,
    cut,
    is_gated,
    key_form,
    slots,
)
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import (
    BlobReader,
    Chunk,
    Common,
    GlobalTensor,
    read_common,
    read_config,
    read_tensors,
    require_apart,
)
from megarlhf.weights.checkpoint.formats.torch_dist.write import plan_torch_dist
from megarlhf.weights.transport.extent import StoredWeights

__all__ = ["TorchDistCheckpoint", "plan_torch_dist", "read_torch_dist"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_OPTIMIZER = ("optimizer.", "chained_")


@dataclass(frozen=True)
class TorchDistCheckpoint(StoredWeights):
    """An opened checkpoint: one part, whose storages are the chunks of the model's tensors."""

    common: Common
    padded_vocab: int
    """Rows of the word embedding, whatever its layout padded them for."""
    head: Head
    form: KeyForm

    @property
    def args(self) -> dict[str, Any]:
        """The saving run's arguments."""
        return self.common.args

    @property
    def iteration(self) -> int | None:
        return self.common.iteration


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
    read_config(directory)
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
    found = _find(directory, whole, tensors, form, arch)
    part, chunks = _cut(whole, found, tensors)
    wanted = {name: (chunk, tensors[key].dtype) for name, (key, chunk) in chunks.items()}
    extents = BlobReader().extents(wanted)
    return TorchDistCheckpoint(directory, (part,), (extents,), common, padded_vocab, head, form)


def _find(
    directory: Path, whole: RankPlacements, tensors: Mapping[str, GlobalTensor], form: KeyForm, arch: Architecture
) -> dict[str, list[Slot]]:
    """Where each storage of the whole model stands.

    Raises: ValueError that lists all that differs.
    """
    found: dict[str, list[Slot]] = {}
    used: set[str] = set()
    missing: dict[str, None] = {}
    wrong: dict[str, str] = {}
    for storage, shape in whole.storages.items():
        name = StorageName.parse(storage)
        other = name.other_norm()
        candidates = [
            slots(
                candidate,
                shape,
                form,
                num_layers=arch.num_layers,
                num_experts=arch.num_experts,
                gated=is_gated(storage, arch.gated_mlp),
            )
            for candidate in ([name] if other is None else [name, other])
        ]
        stands = next((c for c in candidates if all(slot.key in tensors for slot in c)), None)
        if stands is None:
            missing |= {slot.key: None for slot in candidates[0] if slot.key not in tensors}
            continue
        found[storage] = stands
        for slot in stands:
            used.add(slot.key)
            if tensors[slot.key].shape != slot.shape:
                wrong[slot.key] = f"{slot.key} has shape {tensors[slot.key].shape}, expected {slot.shape}"
    problems = [f"{key} is missing" for key in missing] + list(wrong.values())
    problems += [f"{key} is not part of the model" for key in tensors if key not in used]
    if problems:
        raise ValueError(
            f"{directory} differs from the model's config.json in {len(problems)} tensors: {'; '.join(problems)}. "
            "Check that config.json and the checkpoint belong together"
        )
    return found


def _cut(
    whole: RankPlacements, found: Mapping[str, list[Slot]], tensors: Mapping[str, GlobalTensor]
) -> tuple[RankPlacements, dict[str, tuple[str, Chunk]]]:
    """The placements of the whole model cut along the chunks; and each chunk, with its key, by its storage's name."""
    by_storage: dict[str, list[Placement]] = {name: [] for name in whole.storages}
    for placement in whole.placements:
        by_storage[placement.storage].append(placement)
    indices: dict[str, dict[Shape, list[Chunk]]] = {}
    chunks: dict[str, tuple[str, Chunk]] = {}
    placements: list[Placement] = []
    for storage, stands in found.items():
        shape = whole.storages[storage]
        for slot in stands:
            key, num_lead = slot.key, len(slot.lead)
            if key not in indices:
                indices[key] = _by_lead(tensors[key], num_lead)
            for chunk in indices[key].get(slot.lead, ()):
                name = chunk_name(key, chunk.box.start)
                chunks[name] = (key, chunk)
                placements += _pieces(by_storage[storage], shape, slot, chunk.box, name)
    storages = {name: chunk.box.shape for name, (_, chunk) in chunks.items()}
    return RankPlacements(0, storages, tuple(placements), whole.tensors), chunks


def _pieces(placed: list[Placement], shape: Shape, slot: Slot, box: Box, name: str) -> Iterator[Placement]:
    """What a chunk, `box` of the slot's tensor, holds of a storage's placements."""
    num_lead = len(slot.lead)
    strides = contiguous_strides(box.shape)
    offset = sum((i - a) * s for i, a, s in zip(slot.lead, box.start, strides, strict=False))
    shift = (slot.start, *(0 for _ in shape[1:]))
    held = Box(box.start[num_lead:], box.stop[num_lead:]).shift(shift)
    for placement in placed:
        piece = cut(placement, shape, held, storage=name, offset=offset, strides=strides[num_lead:])
        if piece is not None:
            yield piece


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
