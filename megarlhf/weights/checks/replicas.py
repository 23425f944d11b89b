"""What a checkpoint stores more than once must be the same each time: a tied head, and what several ranks hold."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from megarlhf.placement import Box, Placement, RankPlacements, flat_boxes
from megarlhf.weights.checks.digest import BITS
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.extent import Extent, MappedFiles, StoredWeights


def require_equal_copies(
    where: Path,
    parts: Sequence[RankPlacements],
    extents: Sequence[Mapping[str, Extent]],
    is_copy: Callable[[Placement], bool],
) -> None:
    """Compares the placements for which `is_copy` holds with the others of the same logical tensors.

    Raises: ValueError when an element differs: the model is not tied, whatever its description says.
    """
    copies = [_only(part, is_copy) for part in parts]
    tensors = {p.tensor for part in copies for p in part.placements}
    if not tensors:
        return
    originals = [_only(part, lambda p: p.tensor in tensors and not is_copy(p)) for part in parts]
    shifted = [part.on_rank(len(parts) + part.rank) for part in copies]
    maps = MappedFiles()
    for copy in make_plan(originals, shifted).copies:
        a = maps.tensor(extents[copy.src_rank][copy.src_storage])
        b = maps.tensor(extents[copy.dst_rank - len(parts)][copy.dst_storage])
        first = torch.as_strided(a, copy.shape, copy.src_strides, a.storage_offset() + copy.src_offset)
        second = torch.as_strided(b, copy.shape, copy.dst_strides, b.storage_offset() + copy.dst_offset)
        if not torch.equal(first, second):
            raise ValueError(
                f"{where}: the description ties the head to {copy.tensor}, but the copy stored as {copy.dst_storage} "
                "has other values: the model is not tied. Say so in its config.json (tie_word_embeddings: false) or "
                "its args (untie_embeddings_and_output_weights), or remove the copy"
            )


def _only(part: RankPlacements, wanted: Callable[[Placement], bool]) -> RankPlacements:
    return replace(part, placements=tuple(p for p in part.placements if wanted(p)))


_PIECE_ELEMENTS = 1 << 20
_WORTH_THREADS = 16 << 20
"""Elements; norms alone are fewer."""
_Held = tuple[int, Placement]
"""(part, what it holds)."""


def require_equal_replicas(weights: StoredWeights) -> None:
    """Compares, bit for bit, every box that several parts hold: norms under tensor parallelism, all but the experts
    under expert parallelism. Whoever reads the checkpoint takes one of them; Megatron gives each rank its own.

    Raises: ValueError at the first difference: the files are of two runs, or one is damaged.
    """
    held: dict[tuple[str, Box], list[_Held]] = defaultdict(list)
    for number, part in enumerate(weights.parts):
        for placement in part.placements:
            held[placement.tensor, placement.box].append((number, placement))
    pairs = [(same[0], other) for same in held.values() for other in same[1:]]
    maps = MappedFiles()

    def compare(pair: tuple[_Held, _Held]) -> str | None:
        return _first_difference(weights, maps, *pair)

    if sum(other.box.numel for _, (_, other) in pairs) < _WORTH_THREADS:
        _raise_first(weights, map(compare, pairs))
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        _raise_first(weights, pool.map(compare, pairs))


def _raise_first(weights: StoredWeights, found: Iterable[str | None]) -> None:
    for difference in found:
        if difference is not None:
            raise ValueError(
                f"{weights.where}: {difference}. The ranks of a checkpoint hold the same values; these files are of "
                "two runs, or one is damaged: copy it again from its source"
            )


def _first_difference(weights: StoredWeights, maps: MappedFiles, a: _Held, b: _Held) -> str | None:
    """Compared in the narrower dtype, when two ranks were saved in different ones."""
    extents = [weights.extents[part][placement.storage] for part, placement in (a, b)]
    dtype = min((extent.dtype for extent in extents), key=lambda dtype: dtype.itemsize)
    box = a[1].box
    for start in range(0, box.numel, _PIECE_ELEMENTS):
        for piece in flat_boxes(box.shape, start, min(start + _PIECE_ELEMENTS, box.numel)):
            values = []
            for (_, placement), extent in zip((a, b), extents, strict=True):
                part, stored = placement.part(piece.shift(box.start)), maps.tensor(extent)
                offset = stored.storage_offset() + part.offset
                values.append(torch.as_strided(stored, piece.shape, part.strides, offset).to(dtype).contiguous())
            wrong = values[0].view(BITS[dtype.itemsize]) != values[1].view(BITS[dtype.itemsize])
            if bool(wrong.any()):
                at = int(wrong.reshape(-1).to(torch.uint8).argmax())
                said = [value.reshape(-1)[at].item() for value in values]
                names = [extent.path.relative_to(weights.where) for extent in extents]
                return f"{a[1].tensor} is {said[0]!r} in {names[0]} and {said[1]!r} in {names[1]} at one place"
    return None
