"""Placement of a model's elements: boxes of logical tensors, stored as strided views of storages.

A logical tensor has its Hugging Face name and shape. A storage is one flat, contiguous tensor of some system (a file's
tensor, a live parameter). Offsets and strides count elements, never bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The half-open box [start, stop) of a tensor, one entry per dim."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def __str__(self) -> str:
        """`[0:4, 2:3]`."""
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Common box; None if it has no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def minus(self, inner: Box) -> list[Box]:
        """Disjoint boxes that cover this one without `inner`, a box inside it."""
        remainder = []
        start, stop = list(self.start), list(self.stop)
        for dim, (a, b) in enumerate(zip(inner.start, inner.stop, strict=True)):
            if start[dim] < a:
                remainder.append(Box(tuple(start), (*stop[:dim], a, *stop[dim + 1 :])))
            if b < stop[dim]:
                remainder.append(Box((*start[:dim], b, *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = a, b
        return remainder

    def shift(self, by: Shape) -> Box:
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def rows(self, start: int, stop: int) -> Box:
        """Rows [start, stop) of the box, counted from its first row."""
        return Box((self.start[0] + start, *self.start[1:]), (self.start[0] + stop, *self.stop[1:]))

    def blocks(self, limit: int) -> Iterator[Box]:
        """Boxes of at most `limit` elements that make up this box; they have whole rows unless a row is longer."""
        row = math.prod(self.shape[1:])
        step = limit // row * row or limit
        for start in range(0, self.numel, step):
            for box in flat_boxes(self.shape, start, min(start + step, self.numel)):
                yield box.shift(self.start)


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides of `shape`, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def unravel(element: int, shape: Shape) -> Shape:
    """Index of an element counted row-major."""
    index = []
    for stride in contiguous_strides(shape):
        coordinate, element = divmod(element, stride)
        index.append(coordinate)
    return tuple(index)


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Boxes of the elements [start, stop) of `shape` counted row-major, in that order."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row_shape = shape[1:]
    inner = math.prod(row_shape)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)

    def within(row: int, a: int, b: int) -> list[Box]:
        return [Box((row, *box.start), (row + 1, *box.stop)) for box in flat_boxes(row_shape, a, b)]

    if first == last:
        return within(first, head, tail)
    boxes = []
    if head:
        boxes += within(first, head, inner)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in row_shape)), (last, *row_shape)))
    return boxes + within(last, 0, tail)


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a logical tensor, stored in a storage as the strided view (offset, box.shape, strides)."""

    tensor: str
    box: Box
    storage: str
    offset: int
    strides: Shape

    def part(self, box: Box) -> Placement:
        """Placement of `box`, a box of the logical tensor inside this one."""
        if box == self.box:
            return self
        ahead = sum((a - b) * s for a, b, s in zip(box.start, self.box.start, self.strides, strict=True))
        return Placement(self.tensor, box, self.storage, self.offset + ahead, self.strides)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Flat element ranges [start, stop) of the storage that the view covers."""
        dims = sorted((s, n) for s, n in zip(self.strides, self.box.shape, strict=True) if n > 1)
        length = 1
        while dims and dims[0][0] == length:
            length *= dims.pop(0)[1]
        for index in product(*(range(n) for _, n in reversed(dims))):
            start = self.offset + sum(i * s for i, (s, _) in zip(index, reversed(dims), strict=True))
            yield start, start + length


@dataclass(frozen=True)
class RankPlacements:
    """Placements of one rank's part of a model in one system."""

    rank: int
    """Global rank."""
    storages: Mapping[str, Shape]
    """Shape of every storage of the rank, by its name in the system."""
    placements: tuple[Placement, ...]
    tensors: Mapping[str, Shape]
    """Full shape of every logical tensor of which the rank has a box."""

    def on_rank(self, rank: int) -> RankPlacements:
        """The same placements on another rank (a replica); the data is shared."""
        return replace(self, rank=rank)

    def prefixed(self, prefix: str) -> RankPlacements:
        """The same placements with every storage renamed to `prefix + name`."""
        return replace(
            self,
            storages={prefix + name: shape for name, shape in self.storages.items()},
            placements=tuple(replace(p, storage=prefix + p.storage) for p in self.placements),
        )

    def select(self, tensors: Sequence[str] | Mapping[str, object]) -> RankPlacements:
        """Placements of the named logical tensors only, with the storages that they use."""
        wanted = set(tensors)
        kept = tuple(p for p in self.placements if p.tensor in wanted)
        used = {p.storage for p in kept}
        return replace(
            self,
            placements=kept,
            storages={name: shape for name, shape in self.storages.items() if name in used},
            tensors={name: shape for name, shape in self.tensors.items() if name in wanted},
        )

    def by_storage(self) -> dict[str, list[Placement]]:
        """Placements by storage."""
        placements: dict[str, list[Placement]] = {name: [] for name in self.storages}
        for placement in self.placements:
            placements[placement.storage].append(placement)
        return placements

    def padding(self) -> dict[str, list[tuple[int, int]]]:
        """Flat element ranges of each storage that no placement covers; storages without such a range are left out.

        Raises: ValueError if two placements cover the same element.
        """
        gaps: dict[str, list[tuple[int, int]]] = {}
        for name, placements in self.by_storage().items():
            size = math.prod(self.storages[name])
            end = 0
            covered = chain(*(placement.runs() for placement in placements))
            for start, stop in [*sorted(covered), (size, size)]:
                if start < end:
                    raise ValueError(
                        f"rank {self.rank}: element {start} of storage {name} ({size} elements) is placed "
                        "twice or is outside; each element belongs to one logical tensor: correct its table"
                    )
                if start > end:
                    gaps.setdefault(name, []).append((end, start))
                end = stop
        return gaps


def merge_ranks(parts: Sequence[RankPlacements]) -> RankPlacements:
    """Merge parts of one rank, such as the model chunks of a virtual pipeline; storage names must differ.

    Raises: ValueError if ranks differ, or if two parts have the same storage name: prefix them.
    """
    ranks = {part.rank for part in parts}
    if len(ranks) != 1:
        raise ValueError(f"got parts of ranks {sorted(ranks)}, expected parts of one rank")
    storages: dict[str, Shape] = {}
    tensors: dict[str, Shape] = {}
    for part in parts:
        twice = sorted(storages.keys() & part.storages.keys())
        if twice:
            raise ValueError(f"storage {twice[0]} is in two parts ({len(twice)} are); rename with .prefixed('chunk0.')")
        storages.update(part.storages)
        tensors.update(part.tensors)
    return RankPlacements(parts[0].rank, storages, tuple(chain(*(p.placements for p in parts))), tensors)
