"""Messages between pairs of ranks, in terms of memory: copies become strided copies, and these become messages.

For sending, only the memory matters, not tensors and boxes. `coalesce` merges dimensions that are nested without a gap
at both ends, and strided copies that are neighbours at both ends (gate and up; q, k and v of a group; one expert and
the next). In a round a pair of ranks exchanges one message, gathered into a bucket and scattered from another. A large
range that is contiguous at an end is a message of its own: at that end it needs no bucket.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megarlhf.placement import Shape, contiguous_strides, flat_boxes
from megarlhf.weights.plan.copy_plan import Copy, CopyPlan
from megarlhf.weights.transport.schedule import ElementRange, rank_rounds
from megarlhf.weights.transport.storages import Storages, strided


@dataclass(frozen=True, slots=True)
class StridedView:
    """Place of a strided copy's elements in one of its two storages."""

    storage: str
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """`shape` elements from `src` to `dst`, in row-major order; as few dimensions as both ends allow."""

    shape: Shape
    src: StridedView
    dst: StridedView

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self, end: StridedView) -> bool:
        """Whether the elements lie one after the other at this end."""
        return end.strides == contiguous_strides(self.shape)

    def views(self, end: StridedView, storages: Storages, start: int, stop: int) -> list[torch.Tensor]:
        """The elements [start, stop) at one end, in order: a single flat view where they are contiguous."""
        live = storages[end.storage]
        if self.is_contiguous(end):
            return [strided(live, (stop - start,), (1,), end.offset + start)]
        boxes = flat_boxes(self.shape, start, stop)
        offsets = (end.offset + sum(a * s for a, s in zip(box.start, end.strides, strict=True)) for box in boxes)
        return [strided(live, box.shape, end.strides, offset) for box, offset in zip(boxes, offsets, strict=True)]


def coalesce(copies: Iterable[Copy]) -> list[StridedCopy]:
    """The fewest strided copies that move the same elements in the same order."""
    out: list[StridedCopy] = []
    for copy in copies:
        shape, src_strides, dst_strides = _merged_dims(copy.box.shape, copy.src.strides, copy.dst.strides)
        src = StridedView(copy.src.storage, copy.src.offset, src_strides)
        dst = StridedView(copy.dst.storage, copy.dst.offset, dst_strides)
        if out and _follows(out[-1], shape, src, dst):
            before = out.pop()
            out.append(StridedCopy((before.shape[0] + shape[0],), before.src, before.dst))
        else:
            out.append(StridedCopy(shape, src, dst))
    return out


def _merged_dims(shape: Shape, src: Shape, dst: Shape) -> tuple[Shape, Shape, Shape]:
    dims: list[tuple[int, int, int]] = []  # from the innermost: size and both strides
    for n, s, d in zip(reversed(shape), reversed(src), reversed(dst), strict=True):
        if dims and (s, d) == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            inner = dims.pop()
            dims.append((inner[0] * n, *inner[1:]))
        elif n != 1:
            dims.append((n, s, d))
    if not dims:
        return (1,), (1,), (1,)
    sizes, src, dst = zip(*reversed(dims), strict=True)
    return sizes, src, dst


def _follows(before: StridedCopy, shape: Shape, src: StridedView, dst: StridedView) -> bool:
    """Whether both are contiguous, and contiguous together, at both ends."""
    return (
        len(shape) == len(before.shape) == 1
        and all(end.strides == (1,) for end in (before.src, before.dst, src, dst))
        and (before.src.storage, before.src.offset + before.shape[0]) == (src.storage, src.offset)
        and (before.dst.storage, before.dst.offset + before.shape[0]) == (dst.storage, dst.offset)
    )


Slice = tuple[StridedCopy, int, int]
"""The elements [start, stop) of a strided copy."""


class PairTransfer:
    """All that a pair of ranks exchanges, as one row of elements from which ranges are cut."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self.copies = coalesce(copies)
        self._starts = list(accumulate((copy.numel for copy in self.copies), initial=0))

    def slices(self, ranges: Sequence[ElementRange]) -> Iterator[Slice]:
        """Slices inside the ranges, in the transfer's order."""
        for start, stop in ranges:
            number = bisect_right(self._starts, start) - 1
            while number < len(self.copies) and (first := self._starts[number]) < stop:
                yield self.copies[number], max(start - first, 0), min(stop, self._starts[number + 1]) - first
                number += 1


@dataclass(frozen=True, slots=True)
class Message:
    """One `isend` or `irecv`, seen from one end."""

    peer: int
    views: list[torch.Tensor]
    """Elements of the message in live memory, in order."""
    bucket_range: slice | None
    """Place of the message in the bucket. None: a single flat view, sent from or received into live memory directly."""


@dataclass(frozen=True, slots=True)
class Round:
    """Messages of one round. Both ends of a pair post those between them in the same order."""

    sends: list[Message]
    receives: list[Message]


class RankMessages:
    """Messages of one rank under a plan."""

    def __init__(self, plan: CopyPlan, rank: int, min_direct: int) -> None:
        """`min_direct`: elements that make a message of their own worth while; the same on all ranks."""
        self._traffic, self._rank, self._min_direct = plan.traffic, rank, min_direct
        self._local = coalesce(plan.local(rank))
        self._outgoing = {peer: PairTransfer(copies) for peer, copies in plan.sends(rank).items()}
        self._incoming = {peer: PairTransfer(copies) for peer, copies in plan.receives(rank).items()}

    def missing(self, src: Storages, dst: Storages) -> list[str]:
        """Storages that the plan uses and the rank does not have, in words."""
        sources = {copy.src.storage for transfer in self._outgoing.values() for copy in transfer.copies}
        destinations = {copy.dst.storage for transfer in self._incoming.values() for copy in transfer.copies}
        sources.update(copy.src.storage for copy in self._local)
        destinations.update(copy.dst.storage for copy in self._local)
        return [f"source {name}" for name in sorted(sources - src.keys())] + [
            f"destination {name}" for name in sorted(destinations - dst.keys())
        ]

    def local(self, src: Storages, dst: Storages) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(into, from) of what the rank copies from itself."""

        def whole(copy: StridedCopy, end: StridedView, storages: Storages) -> torch.Tensor:
            return strided(storages[end.storage], copy.shape, end.strides, end.offset)

        return [(whole(copy, copy.dst, dst), whole(copy, copy.src, src)) for copy in self._local]

    def rounds(self, capacity: int, src: Storages, dst: Storages, dtype: torch.dtype) -> list[Round]:
        """Rounds in which the rank sends at most `capacity` elements and receives as many.

        What is not of `dtype` goes through a bucket.
        """
        return [
            Round(
                self._messages(self._outgoing, ranges.sends, src, dtype, sending=True),
                self._messages(self._incoming, ranges.receives, dst, dtype, sending=False),
            )
            for ranges in rank_rounds(self._traffic, self._rank, capacity)
        ]

    def _messages(
        self,
        transfers: Mapping[int, PairTransfer],
        ranges: Mapping[int, Sequence[ElementRange]],
        storages: Storages,
        dtype: torch.dtype,
        *,
        sending: bool,
    ) -> list[Message]:
        messages, bucket_end = [], 0
        for peer in ranges:
            for slices in _framed(transfers[peer].slices(ranges[peer]), self._min_direct):
                ends = [copy.src if sending else copy.dst for copy, _, _ in slices]
                views = [
                    view
                    for (copy, start, stop), end in zip(slices, ends, strict=True)
                    for view in copy.views(end, storages, start, stop)
                ]
                in_place = slices[0][0].is_contiguous(ends[0]) and storages[ends[0].storage].dtype == dtype
                if len(slices) == 1 and in_place:
                    messages.append(Message(peer, views, None))
                else:
                    numel = sum(stop - start for _, start, stop in slices)
                    messages.append(Message(peer, views, slice(bucket_end, bucket_end + numel)))
                    bucket_end += numel
        return messages


def bucket_size(messages: Iterable[Message]) -> int:
    """Elements of a bucket that the messages of a round need."""
    return max((message.bucket_range.stop for message in messages if message.bucket_range is not None), default=0)


def _framed(slices: Iterable[Slice], min_direct: int) -> Iterator[list[Slice]]:
    """The messages that carry these slices: all that is small or strided at both ends, then each of the rest alone."""
    bucketed: list[Slice] = []
    direct: list[Slice] = []
    for copy, start, stop in slices:
        contiguous = copy.is_contiguous(copy.src) or copy.is_contiguous(copy.dst)
        (direct if contiguous and stop - start >= min_direct else bucketed).append((copy, start, stop))
    if bucketed:
        yield bucketed
    yield from ([part] for part in direct)
