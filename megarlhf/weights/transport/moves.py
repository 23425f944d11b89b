"""What a pair of ranks exchanges, as memory: strided views at either end, tensors and boxes forgotten.

A copy plan speaks of logical tensors. For carrying it, only the memory matters: dimensions that lie one inside the
other at both ends are one, and neighbours at both ends (gate and up; q, k and v of a group; one expert and the next)
are one run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megarlhf.placement import Shape, contiguous_strides, flat_boxes
from megarlhf.weights.plan.copy_plan import Copy
from megarlhf.weights.transport.schedule import Span
from megarlhf.weights.transport.storages import Storages, strided


@dataclass(frozen=True, slots=True)
class End:
    """Where the elements of a move lie on one of its ranks."""

    storage: str
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Move:
    """`shape` elements from `src` to `dst`, in row-major order; as few dimensions as both ends allow."""

    shape: Shape
    src: End
    dst: End

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, end: End, storages: Storages) -> torch.Tensor:
        """All its elements at one end."""
        return strided(storages[end.storage], self.shape, end.strides, end.offset)

    def in_one_run(self, end: End) -> bool:
        """Whether the elements lie one after the other at this end."""
        return end.strides == contiguous_strides(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """The elements [start, stop) of a move."""

    move: Move
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def views(self, end: End, storages: Storages) -> list[torch.Tensor]:
        """The elements at one end, in order: a single flat view where they are one run."""
        live, shape = storages[end.storage], self.move.shape
        if self.move.in_one_run(end):
            return [strided(live, (self.numel,), (1,), end.offset + self.start)]
        boxes = flat_boxes(shape, self.start, self.stop)
        starts = (sum(a * s for a, s in zip(box.start, end.strides, strict=True)) for box in boxes)
        return [strided(live, box.shape, end.strides, end.offset + at) for box, at in zip(boxes, starts, strict=True)]


def moves_of(copies: Iterable[Copy]) -> list[Move]:
    """The moves that carry these copies, one after the other."""
    moves: list[Move] = []
    for copy in copies:
        shape, src_strides, dst_strides = _collapsed(copy.shape, copy.src_strides, copy.dst_strides)
        src, dst = (
            End(copy.src_storage, copy.src_offset, src_strides),
            End(copy.dst_storage, copy.dst_offset, dst_strides),
        )
        if moves and _follows(moves[-1], shape, src, dst):
            last = moves.pop()
            moves.append(Move((last.shape[0] + shape[0],), last.src, last.dst))
        else:
            moves.append(Move(shape, src, dst))
    return moves


def _collapsed(shape: Shape, src: Shape, dst: Shape) -> tuple[Shape, Shape, Shape]:
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


def _follows(last: Move, shape: Shape, src: End, dst: End) -> bool:
    """Whether both are one run, and one run together, at both ends."""
    return (
        len(shape) == len(last.shape) == 1
        and all(end.strides == (1,) for end in (last.src, last.dst, src, dst))
        and (last.src.storage, last.src.offset + last.shape[0]) == (src.storage, src.offset)
        and (last.dst.storage, last.dst.offset + last.shape[0]) == (dst.storage, dst.offset)
    )


class MoveStream:
    """The moves of a pair as one stream of elements, from which spans are cut."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self.moves = moves_of(copies)
        self._starts = list(accumulate((move.numel for move in self.moves), initial=0))

    def parts(self, spans: Sequence[Span]) -> Iterator[Part]:
        """What lies in the spans, in the stream's order."""
        for start, stop in spans:
            number = bisect_right(self._starts, start) - 1
            while number < len(self.moves) and (at := self._starts[number]) < stop:
                yield Part(self.moves[number], max(start - at, 0), min(stop, self._starts[number + 1]) - at)
                number += 1
