"""Attention plan for a row whose segments continue others: pure integers, made once for all layers.

A segment's tokens see their own past and all of its ancestors. At each level, everything that continues a segment is
contiguous. So attention to a segment is a rectangle: these contiguous queries x all keys of the segment.

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
    """Numbers of queries and keys in a block."""

    queries: int
    keys: int


class Borders(NamedTuple):
    """Borders of blocks. Their queries stand end to end, and so do their keys."""

    cu_queries: Tensor
    """int32 on the device, [blocks + 1]: first query of each block, then the total."""
    cu_keys: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class QueryBlocks:
    """Contiguous blocks of queries, each with its block of keys; the keys are contiguous too."""

    query: int
    """First query in the row."""
    key: int
    """First key in the row."""
    shapes: tuple[Shape, ...]
    """Shapes of the blocks. Some have no queries: their keys only keep the keys contiguous."""
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
        """Runs of neighbouring blocks of equal shape, without blocks that have no queries."""
        runs, query, key = [], self.query, self.key
        for shape, run in itertools.groupby(self.shapes):
            shapes = tuple(run)
            if shape.queries:
                runs.append(QueryBlocks(query, key, shapes, self.device))
            query, key = query + len(shapes) * shape.queries, key + len(shapes) * shape.keys
        return tuple(runs)

    @cached_property
    def seen(self) -> tuple[slice, ...]:
        """Slices of the keys that have queries, counted from the first key."""
        seen, start = [], 0
        for has_queries, shapes in itertools.groupby(self.shapes, lambda shape: shape.queries > 0):
            end = start + sum(shape.keys for shape in shapes)
            if has_queries:
                seen.append(slice(start, end))
            start = end
        return tuple(seen)

    @cached_property
    def borders(self) -> Borders:
        return block_borders(torch.tensor(self.shapes, dtype=torch.int32).t(), self.device)


@dataclass(frozen=True)
class Level:
    """The contiguous segments of one depth below the roots."""

    queries: slice
    ancestors: tuple[QueryBlocks, ...]
    """The level's queries with the keys of their parents, then of their grandparents, up to the roots."""


@dataclass(frozen=True)
class Pasts:
    """Copies of ancestors' tokens in front of each segment."""

    pieces: tuple[tuple[int, int], ...]
    """(segment, number of its last tokens): the tokens that each segment sees, itself last, segment after segment."""
    shapes: tuple[Shape, ...]
    borders: Borders


@dataclass(frozen=True)
class Trees:
    """Attention plan of a row. Made by `plan_trees`."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    device: torch.device
    own: QueryBlocks
    """Each segment with itself."""
    levels: tuple[Level, ...]
    """Levels below the roots, in the order of the row."""
    longest: int
    """Tokens of the longest sequence."""
    _pasts: dict[int | None, Pasts] = field(default_factory=dict, compare=False)

    def pasts(self, window: int | None) -> Pasts:
        """Pasts of all segments under a window. Made once for all layers with this window."""
        if window not in self._pasts:
            seen = [_past(n, self.lengths, self.parents, window) for n in range(len(self.lengths))]
            shapes = tuple(Shape(pieces[-1][1], sum(count for _, count in pieces)) for pieces in seen)
            borders = block_borders(torch.tensor(shapes, dtype=torch.int32).t(), self.device)
            self._pasts[window] = Pasts(tuple(itertools.chain(*seen)), shapes, borders)
        return self._pasts[window]


def plan_trees(lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Trees:
    """Plan attention over a row. `lengths` and `parents` as in `packing.rows.PackedRow`; a root's parent is
    negative."""
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
    """The segments of each level below the roots. Checks their order: level after level, and within a level in the
    order of their parents. It makes everything that continues a segment contiguous at each level."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    below = [n for n, depth in enumerate(depths) if depth]
    assert below[-1] - below[0] == len(below) - 1, (
        f"a root stands between segments {below[0]} and {below[-1]}, which continue others; move further roots behind "
        "the last level"
    )
    for before, n in itertools.pairwise(below):
        assert (depths[before], parents[before]) <= (depths[n], parents[n]), (
            f"segment {n} (level {depths[n]}, parent {parents[n]}) is behind segment {before} (level "
            f"{depths[before]}, parent {parents[before]}); order segments by level, then by parent"
        )
    return [list(level) for _, level in itertools.groupby(below, lambda n: depths[n])]


def _past(n: int, lengths: Sequence[int], parents: Sequence[int], window: int | None) -> list[tuple[int, int]]:
    """Pieces that segment `n` sees, itself last: see `Pasts.pieces`. A window leaves the `window` - 1 tokens of its
    ancestors that stand directly in front of it."""
    pieces, ancestor = [(n, lengths[n])], parents[n]
    room = sum(lengths) if window is None else window - 1
    while ancestor >= 0 and room > 0:
        pieces.append((ancestor, min(lengths[ancestor], room)))
        room -= lengths[ancestor]
        ancestor = parents[ancestor]
    return pieces[::-1]


def block_borders(counts_2M: Tensor, device: torch.device) -> Borders:
    """Borders of M blocks from their numbers of queries and of keys, [2, M] integers on the CPU."""
    cu_2M = torch.zeros(2, counts_2M.size(1) + 1, dtype=torch.int32)
    cu_2M[:, 1:] = counts_2M.cumsum(1)
    cu_2M = cu_2M.to(device)
    return Borders(cu_2M[0], cu_2M[1], *counts_2M.amax(1).tolist())
