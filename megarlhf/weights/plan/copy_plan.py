"""The copy plan: which box of which logical tensor goes from which storage to which. Pure data.

Every rank makes the same plan from the same placements; no process group is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarlhf.placement import Box, Placement, RankPlacements, Shape
from megarlhf.weights.plan.load_balance import SenderShare, balance_senders
from megarlhf.weights.plan.overlaps import NodeOf, Overlap, Ranks, Route, TensorOverlaps, find_overlaps

Pair = tuple[int, int]
"""(source rank, destination rank)."""

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of a logical tensor, from where one rank holds it to where another wants it."""

    src_rank: int
    src: Placement
    dst_rank: int
    dst: Placement
    """The same box of the same tensor at the destination."""

    @property
    def tensor(self) -> str:
        return self.src.tensor

    @property
    def box(self) -> Box:
        return self.src.box

    @property
    def numel(self) -> int:
        return self.src.box.numel

    def part(self, box: Box) -> Copy:
        """The copy of `box`, which is inside this one's."""
        return Copy(self.src_rank, self.src.part(box), self.dst_rank, self.dst.part(box))


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """All copies (or, with `only_rank`, those of one rank) in an order every rank agrees on."""

    copies: tuple[Copy, ...]
    traffic: dict[Pair, int]
    """Elements by (source rank, destination rank), of all ranks; (r, r) are local copies."""
    only_rank: int | None = None

    @cached_property
    def _by_pair(self) -> dict[Pair, list[Copy]]:
        pairs = defaultdict(list)
        for copy in self.copies:
            pairs[copy.src_rank, copy.dst_rank].append(copy)
        return dict(pairs)

    def local(self, rank: int) -> list[Copy]:
        """Copies inside `rank`."""
        self._check(rank)
        return self._by_pair.get((rank, rank), [])

    def sends(self, rank: int) -> dict[int, list[Copy]]:
        """Copies that `rank` sends, by peer in ascending order."""
        self._check(rank)
        return {p[1]: self._by_pair[p] for p in sorted(self._by_pair) if p[0] == rank != p[1]}

    def receives(self, rank: int) -> dict[int, list[Copy]]:
        """Copies that `rank` receives, by peer in ascending order."""
        self._check(rank)
        return {p[0]: self._by_pair[p] for p in sorted(self._by_pair) if p[1] == rank != p[0]}

    def elements_sent(self, rank: int) -> int:
        return sum(n for (src, dst), n in self.traffic.items() if src == rank != dst)

    def elements_received(self, rank: int) -> int:
        return sum(n for (src, dst), n in self.traffic.items() if dst == rank != src)

    def _check(self, rank: int) -> None:
        if self.only_rank not in (None, rank):
            raise ValueError(
                f"asked for the copies of rank {rank}, but the plan was made with "
                f"only_rank={self.only_rank}; make it without only_rank"
            )


def make_plan(
    sources: Sequence[RankPlacements],
    destinations: Sequence[RankPlacements],
    *,
    only_rank: int | None = None,
    node_of: NodeOf | None = None,
) -> CopyPlan:
    """The plan that fills every placement of `destinations` from `sources`, each element exactly once.

    What a rank holds it takes from itself. For the rest, all that other ranks need of what the same set of ranks
    holds, destination by destination, is cut into one contiguous share per holder: senders are balanced to a row,
    and a destination has few peers. With `node_of` (rank -> node) a rank of the same node sends what one holds.
    All ranks must pass the same placements; `only_rank` keeps one rank's copies (but everybody's traffic),
    for large jobs.

    Raises: ValueError when the sources lack something, listing it, or when two ranks disagree on the shape of
    a logical tensor.
    """
    sources = _by_rank(sources, "sources")
    destinations = _by_rank(destinations, "destinations")
    _check_shapes((*sources, *destinations))
    tensors = find_overlaps(sources, destinations, node_of)
    missing = [f"{tensor.name}{box}" for tensor in tensors for box in tensor.pattern.missing]
    if missing:
        _raise_missing(missing)
    needs, traffic = _needs(tensors)
    shares = balance_senders(needs, lambda ranks, rank, position: _row_near(tensors, (ranks, rank), position))
    for (_, dst), parts in shares.items():
        for (src, stop), start in zip(parts, [0, *(end for _, end in parts)], strict=False):
            traffic[src, dst] += stop - start
    return CopyPlan(tuple(_copies(tensors, shares, only_rank)), dict(traffic), only_rank)


def _needs(tensors: Sequence[TensorOverlaps]) -> tuple[dict[Ranks, dict[int, int]], Counter[Pair]]:
    """Elements that each rank needs of each set of holders, ranks ascending, and what ranks have themselves."""
    routes: Counter[Route] = Counter()
    traffic: Counter[Pair] = Counter()
    patterns = {id(tensor.pattern): tensor.pattern for tensor in tensors}
    for pattern, count in Counter(id(tensor.pattern) for tensor in tensors).items():
        for route, numel in patterns[pattern].needs.items():
            routes[route] += numel * count
        for rank, numel in patterns[pattern].local.items():
            traffic[rank, rank] += numel * count
    needs: dict[Ranks, dict[int, int]] = defaultdict(dict)
    for ranks, rank in sorted(routes):
        needs[ranks][rank] = routes[ranks, rank]
    return dict(needs), traffic


def _row_near(tensors: Sequence[TensorOverlaps], route: Route, position: int) -> int:
    """Where a row of the route ends (or starts) nearest to `position`."""
    at = 0
    for tensor in tensors:
        size = tensor.pattern.needs.get(route, 0)
        if at + size < position:
            at += size
            continue
        for overlap in tensor.pattern.of_route.get(route, ()):
            if at + overlap.numel >= position:
                return at + (position - at + overlap.row // 2) // overlap.row * overlap.row
            at += overlap.numel
    raise AssertionError(f"position {position} is behind the end {at} of route {route}")


def _copies(
    tensors: Sequence[TensorOverlaps], shares: Mapping[Route, Sequence[SenderShare]], only_rank: int | None
) -> Iterator[Copy]:
    """Tensor by tensor, then by destination: the order of every pair's route on both its ends."""
    at: dict[Route, int] = defaultdict(int)
    relevant: dict[int, tuple[Overlap, ...]] = {}
    for tensor in tensors:
        pattern = id(tensor.pattern)
        if pattern not in relevant:
            relevant[pattern] = tensor.pattern.of_rank(only_rank)
        for overlap in relevant[pattern]:
            start = 0
            for sender, stop in _senders(overlap, shares, at):
                if start < stop and only_rank in (None, sender, overlap.dst_rank):
                    box = overlap.box
                    if stop - start < overlap.numel:
                        box = box.rows(start // overlap.row, stop // overlap.row)
                    src, dst = tensor.sources[overlap.holders[sender]], tensor.destinations[overlap.wanted]
                    yield Copy(sender, src.part(box), overlap.dst_rank, dst.part(box))
                start = max(start, stop)


def _senders(
    overlap: Overlap, shares: Mapping[Route, Sequence[SenderShare]], at: dict[Route, int]
) -> list[SenderShare]:
    """Senders of the overlap, each with the end of its share; moves the route on."""
    if overlap.route is None:
        return [(overlap.dst_rank, overlap.numel)]
    start = at[overlap.route]
    at[overlap.route] += overlap.numel
    return [(src, min(stop - start, overlap.numel)) for src, stop in shares[overlap.route]]


def _by_rank(parts: Sequence[RankPlacements], side: str) -> list[RankPlacements]:
    ranks = [part.rank for part in parts]
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(f"{side} name ranks {twice} more than once; merge the parts of a rank with merge_ranks")
    return sorted(parts, key=lambda part: part.rank)


def _check_shapes(parts: Sequence[RankPlacements]) -> None:
    shapes: dict[str, tuple[int, Shape]] = {}
    for part in parts:
        for tensor, shape in part.tensors.items():
            first_rank, first_shape = shapes.setdefault(tensor, (part.rank, shape))
            if first_shape != shape:
                raise ValueError(
                    f"{tensor} has shape {first_shape} on rank {first_rank} and {shape} on rank {part.rank}; source "
                    "and destination must be the same model: compare their config.json"
                )


def _raise_missing(missing: Sequence[str]) -> None:
    unique = list(dict.fromkeys(missing))
    more = f" and {len(unique) - _MAX_LISTED} more" if len(unique) > _MAX_LISTED else ""
    raise ValueError(
        f"the sources lack {len(unique)} boxes that the destinations need: "
        f"{', '.join(unique[:_MAX_LISTED])}{more}; "
        "pass the placements of every source rank, of the same model"
    )
