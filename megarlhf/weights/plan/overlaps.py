"""Overlaps of sources and destinations: every wanted box, cut along the boxes that the sources hold.

Layers of a model are cut alike. So overlaps are computed once for each pattern of boxes and ranks, and shared by all
tensors of that pattern: a model of eighteen thousand expert matrices has a few dozen patterns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarlhf.placement import Box, Placement, RankPlacements

Ranks = tuple[int, ...]
"""Ascending."""
Route = tuple[Ranks, int]
"""(the ranks that may send, the rank that receives): all overlaps of a route follow each other, tensor by tensor."""

NodeOf = Sequence[int] | Mapping[int, int]
"""Rank -> node."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part of a wanted box that is in one box of the sources."""

    box: Box
    numel: int
    row: int
    """Elements of one row (index of dim 0); a vector is one row, and is never cut."""
    dst_rank: int
    wanted: int
    """Position among the tensor's destination placements."""
    holders: Mapping[int, int]
    """Rank -> position among the tensor's source placements, of all ranks that hold the source box."""
    route: Route | None
    """The route; None when the destination holds the overlap itself."""


@dataclass(frozen=True)
class OverlapPattern:
    """All overlaps of tensors that are cut alike, in the order of the destination placements."""

    overlaps: tuple[Overlap, ...]
    missing: tuple[Box, ...]

    @cached_property
    def needs(self) -> Counter[Route]:
        """Elements of each route."""
        count: Counter[Route] = Counter()
        for overlap in self.overlaps:
            if overlap.route is not None:
                count[overlap.route] += overlap.numel
        return count

    @cached_property
    def local(self) -> Counter[int]:
        """Elements that a rank takes from itself."""
        count: Counter[int] = Counter()
        for overlap in self.overlaps:
            if overlap.route is None:
                count[overlap.dst_rank] += overlap.numel
        return count

    @cached_property
    def of_route(self) -> dict[Route, list[Overlap]]:
        routes: dict[Route, list[Overlap]] = defaultdict(list)
        for overlap in self.overlaps:
            if overlap.route is not None:
                routes[overlap.route].append(overlap)
        return dict(routes)

    def of_rank(self, rank: int | None) -> tuple[Overlap, ...]:
        """Overlaps that `rank` receives, has or may send; None: all of them."""
        if rank is None:
            return self.overlaps
        return tuple(p for p in self.overlaps if p.dst_rank == rank or (p.route is not None and rank in p.route[0]))


@dataclass(frozen=True, slots=True)
class TensorOverlaps:
    """A logical tensor: its placements on both sides, and how they overlap."""

    name: str
    sources: list[Placement]
    destinations: list[Placement]
    pattern: OverlapPattern


def find_overlaps(
    sources: Sequence[RankPlacements], destinations: Sequence[RankPlacements], node_of: NodeOf | None
) -> list[TensorOverlaps]:
    """The tensors that the destinations want, in the order in which they first name them.

    A rank's own boxes come first, then (with `node_of`) those of its node; only what is left comes from elsewhere.
    """
    sources_of = by_tensor(sources)
    nothing: tuple[list[int], list[Placement]] = ([], [])
    patterns: dict[object, OverlapPattern] = {}
    tensors = []
    for name, (dst_ranks, dst_placements) in by_tensor(destinations).items():
        src_ranks, src_placements = sources_of.get(name, nothing)
        key = (
            tuple(src_ranks),
            tuple([p.box for p in src_placements]),
            tuple(dst_ranks),
            tuple([p.box for p in dst_placements]),
        )
        if key not in patterns:
            patterns[key] = _find_pattern(*key, node_of)
        tensors.append(TensorOverlaps(name, src_placements, dst_placements, patterns[key]))
    return tensors


def by_tensor(parts: Iterable[RankPlacements]) -> dict[str, tuple[list[int], list[Placement]]]:
    """Ranks and placements of each logical tensor."""
    tensors: dict[str, tuple[list[int], list[Placement]]] = {}
    for part in parts:
        rank = part.rank
        for placement in part.placements:
            entry = tensors.get(placement.tensor)
            if entry is None:
                entry = tensors[placement.tensor] = ([], [])
            entry[0].append(rank)
            entry[1].append(placement)
    return tensors


def _find_pattern(
    src_ranks: Ranks, src_boxes: tuple[Box, ...], dst_ranks: Ranks, dst_boxes: tuple[Box, ...], node_of: NodeOf | None
) -> OverlapPattern:
    holders: dict[Box, dict[int, int]] = defaultdict(dict)
    for index, (rank, box) in enumerate(zip(src_ranks, src_boxes, strict=True)):
        holders[box].setdefault(rank, index)
    everywhere = sorted(holders)
    overlaps, missing = [], []
    for index, (rank, wanted) in enumerate(zip(dst_ranks, dst_boxes, strict=True)):
        local = [box for box in everywhere if rank in holders[box]]
        near = []
        if node_of is not None:
            near = [box for box in everywhere if any(node_of[r] == node_of[rank] for r in holders[box])]
        covered, uncovered = split_box(wanted, (*local, *near, *everywhere))
        missing += uncovered
        for box, src_box in covered:
            numel = box.numel
            row = numel // box.shape[0] if len(box.shape) > 1 else numel
            route = None if rank in holders[src_box] else (_senders(holders[src_box], rank, node_of), rank)
            overlaps.append(Overlap(box, numel, row, rank, index, holders[src_box], route))
    return OverlapPattern(tuple(overlaps), tuple(missing))


def _senders(holders: Mapping[int, int], rank: int, node_of: NodeOf | None) -> Ranks:
    if node_of is not None:
        near = [holder for holder in holders if node_of[holder] == node_of[rank]]
        if near:
            return tuple(sorted(near))
    return tuple(sorted(holders))


def split_box(wanted: Box, boxes: Iterable[Box]) -> tuple[list[tuple[Box, Box]], list[Box]]:
    """The wanted box along `boxes`, of which the first that has an element counts.

    Returns: (part, the box that covers it) for what is covered, and the boxes that none covers.
    """
    covered = []
    uncovered = [wanted]
    for box in boxes:
        if wanted.intersect(box) is None:
            continue
        remaining = []
        for open_box in uncovered:
            common = open_box.intersect(box)
            if common is None:
                remaining.append(open_box)
            else:
                covered.append((common, box))
                remaining += open_box.minus(common)
        uncovered = remaining
        if not uncovered:
            break
    return covered, uncovered
