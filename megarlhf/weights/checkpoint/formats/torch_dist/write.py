"""Megatron-Core's `torch_dist` distributed checkpoints, written without Megatron and without a process group.

Each rank of a layout gets a `.distcp` file with the shards that it would save: a tensor that several ranks hold
is saved by the first of them. Tensors' bytes are holes, to be filled through the extents.
"""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout, ModelRank
from megarlhf.architectures.placements import Head
from megarlhf.placement import Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.megatron.tracker import RELEASE, Iteration, checkpoint_directory, write_tracker
from megarlhf.weights.checkpoint.formats.torch_dist.keys import (
    StorageName,
    cut,
    global_slices,
    is_gated,
    shard_name,
)
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import (
    COMMON,
    CONFIG,
    METADATA,
    Blob,
    GlobalTensor,
    SavedShard,
)
from megarlhf.weights.checkpoint.formats.torch_dist.metadata_pickle import pickle_metadata
from megarlhf.weights.checkpoint.formats.torch_dist.shards import LocalShard, extra_states, shards_of
from megarlhf.weights.checkpoint.formats.torch_file.archive import TensorSpec, write_skeleton
from megarlhf.weights.checkpoint.formats.torch_file.zip_archive import ALIGNMENT
from megarlhf.weights.transport.extent import Extent

CHECKPOINT_VERSION = 3.0
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Contents of `metadata.json`."""
_CONTENT = {"singleton_local_shards": False, "non_homogeneous_layers": False}
"""Flags that a loader passes to `sharded_state_dict` to ask for the same keys: Megatron-Core's default, all layers in
one."""


@dataclass
class _RankShards:
    """Shards that one rank saves."""

    rank: int
    storages: dict[str, Shape] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    tensors: dict[str, Shape] = field(default_factory=dict)
    shards: dict[str, LocalShard] = field(default_factory=dict)

    def add(self, shard: LocalShard, shape: Shape, placements: list[Placement], tensors: Mapping[str, Shape]) -> None:
        """A shard of a storage of `shape` with these placements."""
        name = shard_name(shard.key, shard.box.start)
        self.storages[name] = shard.box.shape
        self.shards[name] = shard
        strides = contiguous_strides(shard.local.shape)
        for placement in placements:
            part = cut(placement, shape, shard.local, storage=name, offset=0, strides=strides)
            if part is not None:
                self.placements.append(part)
                self.tensors[part.tensor] = tensors[part.tensor]

    def build(self) -> RankPlacements:
        return RankPlacements(self.rank, self.storages, tuple(self.placements), self.tensors)


def preallocate_torch_dist(
    root: Path,
    arch: Architecture,
    layout: MegatronLayout,
    head: Head,
    dtype: torch.dtype,
    args: Mapping[str, Any],
    iteration: Iteration,
) -> tuple[list[RankPlacements], list[dict[str, Extent]]]:
    """Writes a checkpoint, all but the tensors' bytes, as the latest of `root`, which exists.

    Returns what each rank of `layout.ranks()` saves, and the extents of its shards. Padding stays zero.
    `layout.spec` makes a difference for the norm ahead of experts only, which Megatron names by it; experts stand
    the same, each or grouped. `args`: see `megatron/args.py`.

    Raises: ValueError when the layout does not fit the model.
    """
    ranks = _ranks(arch, layout, head)
    directory = checkpoint_directory(root, iteration)
    directory.mkdir()
    files = _BlobFiles(directory, dtype)
    extents = [files.write(rank) for rank in ranks]
    objects = dict.fromkeys((state.unique_key for state in extra_states(arch)), files.write_nothing())
    shapes: dict[str, Shape] = {}
    shards: dict[str, list[SavedShard]] = {}
    for rank in ranks:
        for name, shard in rank.shards.items():
            shapes[shard.key] = shard.tensor
            shards.setdefault(shard.key, []).append(SavedShard(shard.box, files.blobs[name]))
    tensors = {key: GlobalTensor(shape, dtype, tuple(shards[key])) for key, shape in shapes.items()}
    (directory / METADATA).write_bytes(pickle_metadata(tensors, objects))
    write_skeleton(directory / COMMON, common_state(args, 0 if iteration == RELEASE else iteration))
    (directory / CONFIG).write_text(json.dumps(BACKENDS), encoding="ascii")
    write_tracker(root, iteration)
    return [rank.build() for rank in ranks], extents


def common_state(args: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Contents of `common.pt`, which belong to no rank. `args`: see `megatron/args.py`."""
    return {
        "args": Namespace(**args),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "content_metadata": _CONTENT,
    }


def _ranks(arch: Architecture, layout: MegatronLayout, head: Head) -> list[_RankShards]:
    chunks = layout.chunk_layers(arch.num_layers)
    split = replace(layout, spec="te", experts="each")
    undivided = replace(split, tp=1)
    whole: dict[tuple[int, int], Mapping[str, Shape]] = {}
    ranks = []
    for number, at in enumerate(layout.ranks()):
        rank = _RankShards(number)
        for v, layers in enumerate(chunks[at.pp]):
            if (at.pp, v) not in whole:
                whole[at.pp, v] = undivided.chunk(arch, head, replace(at, tp=0), v, layers).storages
            on_rank = split.chunk(arch, head, at, v, layers)
            _add_model_chunk(rank, arch, layout, head, at, layers, on_rank, whole[at.pp, v])
        ranks.append(rank)
    return ranks


def _add_model_chunk(
    rank: _RankShards,
    arch: Architecture,
    layout: MegatronLayout,
    head: Head,
    at: ModelRank,
    layers: range,
    on_rank: RankPlacements,
    whole: Mapping[str, Shape],
) -> None:
    """Add the rank's shards of a model chunk: `on_rank` by its parameters, whose shapes without tp are `whole`."""
    by_storage = on_rank.by_storage()
    per_rank = arch.num_experts // layout.ep
    for storage, shape in on_rank.storages.items():
        name = StorageName.parse(storage)
        if layout.spec == "local" and name.tail.startswith("pre_mlp_layernorm."):
            # The local spec saves every norm under the name of a fused one, also that ahead of experts.
            name = name.other_norm() or name
        tied = arch.tied_embeddings and head == "lm" and storage == "output_layer.weight"
        sharded = shape != whole[storage]
        first = (sharded or at.tp == 0) and (name.expert is not None or at.ep == 0)
        if tied or not first:
            continue
        (part,) = global_slices(
            name.globally(layers, at.ep * per_rank),
            whole[storage],
            "stacked",
            num_layers=arch.num_layers,
            num_experts=arch.num_experts,
            gated=False,
        )
        halves = 2 if is_gated(storage, arch.gated_mlp) else 1
        for shard in shards_of(shape, whole[storage], part, at.tp, halves):
            rank.add(shard, shape, by_storage[storage], on_rank.tensors)


class _BlobFiles:
    """Writes the `.distcp` files: blobs one after the other, each aligned so that its tensor is."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._directory, self._dtype = directory, dtype
        self._templates: dict[Shape, tuple[bytes, bytes]] = {}
        self.blobs: dict[str, Blob] = {}
        """Blobs by the name of the shard's storage."""

    def write(self, rank: _RankShards) -> dict[str, Extent]:
        """The rank's shards; a rank that saves nothing has no file."""
        path = self._directory / f"__{rank.rank}_0.distcp"
        extents: dict[str, Extent] = {}
        if not rank.storages:
            return extents
        with path.open("wb") as file:
            at = 0
            for name, shape in rank.storages.items():
                head, tail = self._template(shape)
                start = at + len(head)
                end = start + math.prod(shape) * self._dtype.itemsize
                os.pwrite(file.fileno(), head, at)
                os.pwrite(file.fileno(), tail, end)
                extents[name] = Extent(path, start, shape, self._dtype)
                self.blobs[name] = Blob(path, at, end + len(tail) - at)
                at = -(-(end + len(tail)) // ALIGNMENT) * ALIGNMENT
        return extents

    def write_nothing(self) -> Blob:
        """One blob for all `_extra_state`s, [None], behind the first rank's shards."""
        path = self._directory / "__0_0.distcp"
        at = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
        _, end = write_skeleton(path, [None], offset=at)
        return Blob(path, at, end - at)

    def _template(self, shape: Shape) -> tuple[bytes, bytes]:
        """A blob up to its tensor's bytes, and what follows them; blobs of one shape differ in nothing else."""
        if shape not in self._templates:
            path = self._directory / "archive"
            extent, end = write_skeleton(path, TensorSpec(shape, self._dtype))
            with path.open("rb") as file:
                head = file.read(extent.offset)
                file.seek(extent.end)
                self._templates[shape] = (head, file.read(end - extent.end))
            path.unlink()
        return self._templates[shape]
