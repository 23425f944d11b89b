"""A tied head is the embedding: where a checkpoint stores it once more, the copies must be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megarlhf.weights.formats.extent import Extent, MappedFiles
from megarlhf.weights.placement import Placement, RankPlacements
from megarlhf.weights.plan import make_plan


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
