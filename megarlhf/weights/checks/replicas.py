"""Check that copies in a checkpoint are equal: a tied head, and parts that several ranks hold."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from megarlhf.placement import Box, Placement, RankPlacements
from megarlhf.weights.checks.digest import first_difference
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.extent import CheckpointWeights, Extent, MappedFiles


def require_equal_copies(
    directory: Path,
    parts: Sequence[RankPlacements],
    extents: Sequence[Mapping[str, Extent]],
    is_copy: Callable[[Placement], bool],
) -> None:
    """Compares the placements for which `is_copy` holds with the others of the same logical tensors.

    Raises: ValueError when an element differs: the model is not tied, whatever its description says.
    """
    tensors = {p.tensor for part in parts for p in part.placements if is_copy(p)}
    originals, copies = [], []
    for part in parts:
        of_tensors = [p for p in part.placements if p.tensor in tensors]
        originals.append(replace(part, placements=tuple(p for p in of_tensors if not is_copy(p))))
        repeated = tuple(p for p in of_tensors if is_copy(p))
        copies.append(replace(part, rank=len(parts) + part.rank, placements=repeated))
    maps = MappedFiles()
    for copy in make_plan(originals, copies).copies:
        original = maps.view(copy.src, extents[copy.src_rank])
        if not torch.equal(original, maps.view(copy.dst, extents[copy.dst_rank - len(parts)])):
            raise ValueError(
                f"{directory}: the description ties the head to {copy.tensor}, but the copy stored as "
                f"{copy.dst.storage} has other values: the model is not tied. Say so in its config.json "
                "(tie_word_embeddings: false) or its args (untie_embeddings_and_output_weights), or remove the copy"
            )


_BLOCK_ELEMENTS = 1 << 20
_WORTH_THREADS = 16 << 20
"""Elements; norms alone are fewer."""
_Replica = tuple[int, Placement]
"""(part, one of its placements)."""


def require_equal_replicas(weights: CheckpointWeights) -> None:
    """Compares, bit for bit, every box that several parts hold: norms under tensor parallelism, all but the experts
    under expert parallelism. Whoever reads the checkpoint takes one of them; Megatron gives each rank its own.

    Raises: ValueError at the first difference: the files are of two runs, or one is damaged.
    """
    replicas: dict[tuple[str, Box], list[_Replica]] = defaultdict(list)
    for number, part in enumerate(weights.parts):
        for placement in part.placements:
            replicas[placement.tensor, placement.box].append((number, placement))
    pairs = [(same[0], other) for same in replicas.values() for other in same[1:]]
    maps = MappedFiles()

    def compare(pair: tuple[_Replica, _Replica]) -> str | None:
        return _first_difference(weights, maps, *pair)

    large = sum(other.box.numel for _, (_, other) in pairs) >= _WORTH_THREADS
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # starts no thread before it is given work
        differences = pool.map(compare, pairs) if large else map(compare, pairs)
        if difference := next(filter(None, differences), None):
            raise ValueError(
                f"{weights.directory}: {difference}. The ranks of a checkpoint hold the same values; these files are "
                "of two runs, or one is damaged: copy it again from its source"
            )


def _first_difference(weights: CheckpointWeights, maps: MappedFiles, a: _Replica, b: _Replica) -> str | None:
    """Compared in the narrower dtype, when two ranks were saved in different ones."""
    extents = [weights.extents[part][placement.storage] for part, placement in (a, b)]
    dtype = min((extent.dtype for extent in extents), key=lambda dtype: dtype.itemsize)
    for box in a[1].box.blocks(_BLOCK_ELEMENTS):
        blocks = [maps.view(placement.part(box), weights.extents[part]).to(dtype) for part, placement in (a, b)]
        if difference := first_difference(*blocks):
            _, *values = difference
            names = [extent.path.relative_to(weights.directory) for extent in extents]
            return f"{a[1].tensor} is {values[0]!r} in {names[0]} and {values[1]!r} in {names[1]} at one place"
    return None
