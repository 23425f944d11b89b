"""What attention has to look at in a row whose segments continue others: pure integers, made once for all layers.

A segment's tokens see their own past and all of its ancestors. At each level, what continues a segment is one stretch
of the row, and so what sees it is a rectangle: that stretch's queries, all of the segment's keys.

Legend: N segments.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """Of a block."""

    queries: int
    keys: int


class Borders(NamedTuple):
    """Where blocks begin and end among their queries and among their keys, which stand end to end each."""

    cu_queries: Tensor
    """int32, on the device, one more than blocks; it begins with 0."""
    cu_keys: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of queries that stand end to end in the row, each with its block of keys, which do so too."""

    query: int
    """Where the queries begin in the row."""
    key: int
    shapes: tuple[Shape, ...]
    """Block after block; some keys have no queries, which are there to stand end to end."""
    device: torch.device

    @cached_property
    def num_queries(self) -> int:
        return sum(shape.queries for shape in self.shapes)

    @cached_property
    def queries(self) -> slice:
        return slice(self.query, self.query + self.num_queries)

    @cached_property
    def keys(self) -> slice:
        return slice(self.key, self.key + sum(shape.keys for shape in self.shapes))

    @cached_property
    def runs(self) -> tuple[QueryBlocks, ...]:
        """Neighbours of equal shape; without keys that have no queries."""
        found, query, key = [], self.query, self.key
        for shape, run in itertools.groupby(self.shapes):
            shapes = tuple(run)
            if shape.queries:
                found.append(QueryBlocks(query, key, shapes, self.device))
            query, key = query + len(shapes) * shape.queries, key + len(shapes) * shape.keys
        return tuple(found)

    @cached_property
    def seen(self) -> tuple[slice, ...]:
        """Stretches of its keys that have queries, counted from its first key."""
        found, at = [], 0
        for has_queries, some in itertools.groupby(self.shapes, lambda shape: shape.queries > 0):
            end = at + sum(shape.keys for shape in some)
            if has_queries:
                found.append(slice(at, end))
            at = end
        return tuple(found)

    @cached_property
    def borders(self) -> Borders:
        return _borders(self.shapes, self.device)


@dataclass(frozen=True)
class Level:
    """The segments of one depth below the roots, which are neighbours."""

    queries: slice
    ancestors: tuple[QueryBlocks, ...]
    """Their queries with the keys of what they continue, then of what that continues, up to the roots."""


@dataclass(frozen=True)
class Pasts:
    """Each segment behind those tokens of its ancestors that it sees."""

    pieces: tuple[tuple[int, int], ...]
    """(segment, how many of its last tokens), segment after segment: what each of them sees, itself last."""
    shapes: tuple[Shape, ...]
    borders: Borders


@dataclass(frozen=True)
class Trees:
    """Made by `plan_trees`."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    device: torch.device
    own: QueryBlocks
    """Each segment with itself."""
    levels: tuple[Level, ...]
    """Those below the roots, in the order of the row."""
    longest: int
    """Tokens of the longest sequence."""
    _pasts: dict[int | None, Pasts] = field(default_factory=dict, compare=False)

    def pasts(self, window: int | None) -> Pasts:
        """Made once for all layers that have this window."""
        if window not in self._pasts:
            seen = [_past(n, self.lengths, self.parents, window) for n in range(len(self.lengths))]
            shapes = tuple(Shape(pieces[-1][1], sum(kept for _, kept in pieces)) for pieces in seen)
            pieces = tuple(itertools.chain(*seen))
            self._pasts[window] = Pasts(pieces, shapes, _borders(shapes, self.device))
        return self._pasts[window]


def plan_trees(lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Trees:
    """`lengths` and `parents` as in `packed_rows.PackedRow`; the parent of a root is negative."""
    starts = [0, *itertools.accumulate(lengths)]
    ends: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        ends.append(length if parent < 0 else ends[parent] + length)
    levels = []
    for members in _levels(parents):
        ancestors, parts = [parents[n] for n in members], []
        while ancestors[0] >= 0:
            queries: Counter[int] = Counter()
            for n, ancestor in zip(members, ancestors, strict=True):
                queries[ancestor] += lengths[n]
            between = range(ancestors[0], ancestors[-1] + 1)
            shapes = tuple(Shape(queries[n], lengths[n]) for n in between)
            parts.append(QueryBlocks(starts[members[0]], starts[between[0]], shapes, device))
            ancestors = [parents[n] for n in ancestors]
        levels.append(Level(slice(starts[members[0]], starts[members[-1] + 1]), tuple(parts)))
    own = QueryBlocks(0, 0, tuple(Shape(length, length) for length in lengths), device)
    return Trees(tuple(lengths), tuple(parents), device, own, tuple(levels), max(ends))


def _levels(parents: Sequence[int]) -> list[list[int]]:
    """The segments of each level below the roots. They have to stand in the order that makes what continues a segment
    one stretch at each level: level after level, and in each in the order of what they continue."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    deeper = [n for n, depth in enumerate(depths) if depth]
    assert deeper[-1] - deeper[0] == len(deeper) - 1, (
        f"a root stands between the segments {deeper[0]} and {deeper[-1]}, which continue others: further roots stand "
        "behind the last level"
    )
    for before, n in itertools.pairwise(deeper):
        assert (depths[before], parents[before]) <= (depths[n], parents[n]), (
            f"segment {n}, at level {depths[n]}, continues {parents[n]} and stands behind segment {before}, at level "
            f"{depths[before]}, which continues {parents[before]}: a row holds level after level, and in each the "
            "segments in the order of what they continue"
        )
    return [list(level) for _, level in itertools.groupby(deeper, lambda n: depths[n])]


def _past(n: int, lengths: Sequence[int], parents: Sequence[int], window: int | None) -> list[tuple[int, int]]:
    """What a segment sees, itself last: see `Pasts.pieces`. Of its ancestors a window leaves the `window` - 1 tokens in
    front of it."""
    pieces, ancestor = [(n, lengths[n])], parents[n]
    room = sum(lengths) if window is None else window - 1
    while ancestor >= 0 and room > 0:
        pieces.append((ancestor, min(lengths[ancestor], room)))
        room -= lengths[ancestor]
        ancestor = parents[ancestor]
    return pieces[::-1]


def _borders(shapes: Sequence[Shape], device: torch.device) -> Borders:
    cu_2M = torch.zeros(2, len(shapes) + 1, dtype=torch.int32)
    cu_2M[:, 1:] = torch.tensor(shapes, dtype=torch.int32).t().cumsum(1)
    cu_2M = cu_2M.to(device)
    return Borders(cu_2M[0], cu_2M[1], max(shape.queries for shape in shapes), max(shape.keys for shape in shapes))
