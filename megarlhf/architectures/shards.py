"""How one rank's storage is put together from boxes of logical tensors: a few combinators, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarlhf.placement import Box, Placement, Shape, contiguous_strides


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical tensor: its Hugging Face name and full shape."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class StorageSegment:
    """A box of a logical tensor, where it starts in the storage, and along which of its dims it runs."""

    tensor: str
    box: Box
    at: Shape
    dims: tuple[int, ...]
    """The storage's dim of each dim of the box: (1, 0) is a transpose, (1, 2) a slice of a stack."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The shape of a storage and the segments in it; what no segment covers is padding."""

    shape: Shape
    segments: tuple[StorageSegment, ...]
    declared_shape: Shape | None = None
    """Shape under which the system declares the storage, where it reads its memory as `shape`."""

    def placements(self, storage: str) -> tuple[Placement, ...]:
        return tuple(_placement(segment, storage, self.shape) for segment in self.segments)

    @property
    def declared(self) -> Shape:
        return self.shape if self.declared_shape is None else self.declared_shape


def _placement(segment: StorageSegment, storage: str, shape: Shape) -> Placement:
    extent = [1] * len(shape)
    for dim, size in zip(segment.dims, segment.box.shape, strict=True):
        extent[dim] = size
    inside = all(a >= 0 and a + n <= size for a, n, size in zip(segment.at, extent, shape, strict=True))
    assert inside, f"{segment.tensor}: {segment.box.shape} at {segment.at} leaves {storage} of shape {shape}"
    strides = contiguous_strides(shape)
    offset = sum(a * s for a, s in zip(segment.at, strides, strict=True))
    return Placement(segment.tensor, segment.box, storage, offset, tuple(strides[dim] for dim in segment.dims))


def _straight(tensor: LogicalTensor, box: Box) -> StorageSegment:
    """A box that starts the storage and runs as the tensor does."""
    rank = len(tensor.shape)
    return StorageSegment(tensor.name, box, (0,) * rank, tuple(range(rank)))


def rows(tensor: LogicalTensor, start: int, stop: int) -> Shard:
    """Rows [start, stop) of the tensor, as far as it has them; the rest is padding."""
    shape = (stop - start, *tensor.shape[1:])
    real = min(stop, tensor.shape[0])
    if real <= start:
        return Shard(shape, ())
    return Shard(shape, (_straight(tensor, Box.whole(tensor.shape).rows(start, real)),))


def column_parallel(tensor: LogicalTensor, tp: int, tp_rank: int, *, padded_rows: int | None = None) -> Shard:
    """Rank's equal share of the rows (output features), of `padded_rows` rows if given."""
    total = tensor.shape[0] if padded_rows is None else padded_rows
    if total < tensor.shape[0]:
        raise ValueError(
            f"{tensor.name} has {tensor.shape[0]} rows, more than the padded {total}; pad to at least that"
        )
    share = divide(total, tp, f"rows of {tensor.name}")
    return rows(tensor, tp_rank * share, (tp_rank + 1) * share)


def row_parallel(tensor: LogicalTensor, tp: int, tp_rank: int) -> Shard:
    """Rank's equal share of the columns (input features)."""
    num_rows, num_columns = tensor.shape
    share = divide(num_columns, tp, f"columns of {tensor.name}")
    box = Box((0, tp_rank * share), (num_rows, (tp_rank + 1) * share))
    return Shard((num_rows, share), (_straight(tensor, box),))


def fused_rows(*shards: Shard) -> Shard:
    """The shards stacked in dim 0 of the storage."""
    segments = []
    end = 0
    for shard in shards:
        segments += [replace(s, at=(s.at[0] + end, *s.at[1:])) for s in shard.segments]
        end += shard.shape[0]
    return Shard((end, *shards[0].shape[1:]), tuple(segments))


def cut_rows(shard: Shard, start: int, stop: int) -> Shard:
    """Rows [start, stop) of a shard whose segments run along the storage's dim 0 with their own."""
    segments = []
    for s in shard.segments:
        assert s.dims[0] == 0, f"{s.tensor} does not run along the rows of its storage"
        first, last = max(start, s.at[0]), min(stop, s.at[0] + s.box.shape[0])
        if first < last:
            box = s.box.rows(first - s.at[0], last - s.at[0])
            segments.append(replace(s, box=box, at=(first - start, *s.at[1:])))
    return Shard((stop - start, *shard.shape[1:]), tuple(segments))


def transposed_tensors(shard: Shard) -> Shard:
    """Turn a shard of the transposed tensors into one of the tensors themselves."""
    return replace(
        shard,
        segments=tuple(
            replace(s, box=Box(s.box.start[::-1], s.box.stop[::-1]), dims=s.dims[::-1]) for s in shard.segments
        ),
    )


def transposed_storage(shard: Shard) -> Shard:
    """The shard with its two storage dims exchanged."""
    assert len(shard.shape) == 2, f"a storage of shape {shard.shape} has no transpose"
    flipped = (replace(s, at=s.at[::-1], dims=tuple(1 - dim for dim in s.dims)) for s in shard.segments)
    return Shard(shard.shape[::-1], tuple(flipped))


def stacked(shards: Sequence[Shard], declared_shape: Shape | None = None) -> Shard:
    """Equal shapes along a new first dim of the storage."""
    shape = shards[0].shape
    assert all(shard.shape == shape for shard in shards), "only equal shapes stack"
    segments = tuple(
        replace(s, at=(index, *s.at), dims=tuple(dim + 1 for dim in s.dims))
        for index, shard in enumerate(shards)
        for s in shard.segments
    )
    return Shard((len(shards), *shape), segments, declared_shape)


def divide(total: int, tp: int, unit: str) -> int:
    share, remainder = divmod(total, tp)
    if remainder:
        raise ValueError(f"{total} {unit} do not divide by tp = {tp}; choose a tp that divides {total}")
    return share
