"""Live storages of a rank: views of them, copies inside the rank, loading from files.

The only arithmetic is a stated cast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from megarlhf.placement import Placement, RankPlacements, Shape
from megarlhf.weights.plan.copy_plan import Copy, make_plan
from megarlhf.weights.transport.extent import CheckpointWeights, MappedFiles

Storages = Mapping[str, torch.Tensor]


def view(placement: Placement, storages: Storages) -> torch.Tensor:
    """The placement's box as a view of its live storage."""
    return strided(storages[placement.storage], placement.box.shape, placement.strides, placement.offset)


def strided(live: torch.Tensor, shape: Shape, strides: Shape, offset: int) -> torch.Tensor:
    """A view of a live storage, itself any contiguous view (a DDP buffer's, say), from element `offset` of it on."""
    assert live.is_contiguous(), f"a live tensor of shape {tuple(live.shape)} is not contiguous"
    return torch.as_strided(live.detach(), shape, strides, live.storage_offset() + offset)


def check_storages(placements: RankPlacements, live: Storages) -> None:
    """Raises ValueError, listing every problem, unless `live` is what `placements` describes."""
    problems = []
    for name, shape in placements.storages.items():
        if name not in live:
            problems.append(f"{name} is missing")
        elif tuple(live[name].shape) != tuple(shape):
            problems.append(f"{name} has shape {tuple(live[name].shape)}, expected {tuple(shape)}")
        elif not live[name].is_contiguous():
            problems.append(f"{name} is not contiguous")
    problems += [f"{name} is unknown" for name in live if name not in placements.storages]
    if problems:
        raise ValueError(
            f"rank {placements.rank}: {len(problems)} live tensors do not fit the placements: "
            f"{'; '.join(problems)}. Pass the parameters of the model and layout that the placements describe"
        )


@torch.no_grad()
def copy_local(copies: Iterable[Copy], src: Storages, dst: Storages, dtype: torch.dtype | None = None) -> None:
    """Copies inside one rank, cast to the destination's dtype, by way of `dtype` if given.

    `dtype` makes a local copy give the same bits as one that travelled in that dtype.
    """
    for copy in copies:
        values = view(copy.src, src)
        view(copy.dst, dst).copy_(values if dtype is None else values.to(dtype))


@torch.no_grad()
def load_from_files(
    placements: RankPlacements, weights: CheckpointWeights, dst: Storages, *, skip: Collection[str] = ()
) -> None:
    """Fills a rank's storages from files of any format and layout, reading only its boxes, cast to each
    storage's dtype.

    `skip` names logical tensors that somebody else fills (a fresh score head). Padding is set to zero.

    Raises: ValueError when a logical tensor's shape differs, when the files lack a box, or when they are short.
    """
    wanted = placements.select([tensor for tensor in placements.tensors if tensor not in skip])
    in_files = {tensor for part in weights.parts for tensor in part.tensors}
    missing = [tensor for tensor in wanted.tensors if tensor not in in_files]
    if missing:
        raise ValueError(
            f"{weights.directory} lacks {len(missing)} tensors of the model: {', '.join(missing)}; is this the "
            "checkpoint of the configured model, with the head that its role needs?"
        )
    rank = len(weights.parts)
    plan = make_plan(weights.parts, [wanted.on_rank(rank)], only_rank=rank)
    maps = MappedFiles()
    for copy in plan.copies:
        view(copy.dst, dst).copy_(maps.view(copy.src, weights.extents[copy.src_rank]))
    zero_padding(placements, dst)


@torch.no_grad()
def zero_padding(placements: RankPlacements, storages: Storages) -> None:
    """Sets to zero what no logical tensor occupies (rows of the padded vocabulary)."""
    for name, gaps in placements.padding().items():
        flat = storages[name].detach().view(-1)
        for start, stop in gaps:
            flat[start:stop] = 0
