"""The copy plan: which box of which logical tensor goes from which storage to which. Pure data.

Every rank makes the same plan from the same placements; no process group is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megarlhf.weights.placement import Box, Placement, RankPlacements, Shape, flat_boxes
from megarlhf.weights.schedule import Pair, RankRound, Span, rank_rounds

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of a logical tensor, from a strided view of one storage to one of another."""

    tensor: str
    box: Box
    src_rank: int
    src_storage: str
    src_offset: int
    src_strides: Shape
    dst_rank: int
    dst_storage: str
    dst_offset: int
    dst_strides: Shape

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def source(self) -> Placement:
        return Placement(self.tensor, self.box, self.src_storage, self.src_offset, self.src_strides)

    @property
    def destination(self) -> Placement:
        return Placement(self.tensor, self.box, self.dst_storage, self.dst_offset, self.dst_strides)

    def part(self, start: int, stop: int) -> list[Copy]:
        """The copies of the elements [start, stop) of this one, counted row-major in its box."""
        if (start, stop) == (0, self.numel):
            return [self]
        boxes = (box.shift(self.box.start) for box in flat_boxes(self.shape, start, stop))
        return [_copy(self.src_rank, self.source.part(box), self.dst_rank, self.destination.part(box)) for box in boxes]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round of one rank: one message per peer, made of these copies one after the other."""

    sends: dict[int, list[Copy]]
    receives: dict[int, list[Copy]]


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """All copies (or, with `only_rank`, those of one rank) in an order every rank agrees on."""

    copies: tuple[Copy, ...]
    traffic: dict[Pair, int]
    """Elements by (source rank, destination rank), of all ranks; (r, r) are local copies."""
    only_rank: int | None = None
    _exchanges: dict[tuple[int, int], list[Exchange]] = field(default_factory=dict, repr=False)

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
        """What `rank` sends, by peer in ascending order."""
        self._check(rank)
        return {p[1]: self._by_pair[p] for p in sorted(self._by_pair) if p[0] == rank != p[1]}

    def receives(self, rank: int) -> dict[int, list[Copy]]:
        """What `rank` receives, by peer in ascending order."""
        self._check(rank)
        return {p[0]: self._by_pair[p] for p in sorted(self._by_pair) if p[1] == rank != p[0]}

    def elements_sent(self, rank: int) -> int:
        return sum(n for (src, dst), n in self.traffic.items() if src == rank != dst)

    def elements_received(self, rank: int) -> int:
        return sum(n for (src, dst), n in self.traffic.items() if dst == rank != src)

    def exchanges(self, rank: int, capacity: int) -> list[Exchange]:
        """The rounds of `rank`, each sending and receiving at most `capacity` elements; made once, kept."""
        key = (rank, capacity)
        if key not in self._exchanges:
            sends, receives = self.sends(rank), self.receives(rank)
            self._exchanges[key] = [
                _exchange(rounds, sends, receives) for rounds in rank_rounds(self.traffic, rank, capacity)
            ]
        return self._exchanges[key]

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
) -> CopyPlan:
    """The plan that fills every placement of `destinations` from `sources`, each element exactly once.

    What a rank holds it takes from itself; the rest comes from the replica that has sent the least so far.
    All ranks must pass the same placements; `only_rank` keeps one rank's copies (but everybody's traffic),
    for large jobs.

    Raises: ValueError when the sources lack something, listing it, or when two ranks disagree on the shape of
    a logical tensor.
    """
    sources = _by_rank(sources, "sources")
    destinations = _by_rank(destinations, "destinations")
    _check_shapes((*sources, *destinations))
    held = _Held(sources)
    traffic: dict[Pair, int] = defaultdict(int)
    load: dict[int, int] = defaultdict(int)
    copies: list[Copy] = []
    missing: list[str] = []
    for rank, placement in _by_tensor(destinations):
        cut = held.cut(rank, placement)
        missing += [f"{placement.tensor}{_slices(box)}" for box in cut.missing]
        for box, source_box in cut.pieces:
            holders = held.holders(placement.tensor, source_box)
            src = rank if rank in holders else min(holders, key=lambda r: (load[r], r))
            if src != rank:
                load[src] += box.numel
            traffic[src, rank] += box.numel
            if only_rank in (None, src, rank):
                copies.append(_copy(src, holders[src].part(box), rank, placement.part(box)))
    if missing:
        _raise_missing(missing)
    return CopyPlan(tuple(copies), dict(traffic), only_rank)


def _copy(src_rank: int, src: Placement, dst_rank: int, dst: Placement) -> Copy:
    return Copy(
        src.tensor,
        src.box,
        src_rank,
        src.storage,
        src.offset,
        src.strides,
        dst_rank,
        dst.storage,
        dst.offset,
        dst.strides,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    pieces: list[tuple[Box, Box]]
    """(box to copy, the source box that has it)."""
    missing: list[Box]


class _Held:
    """Who holds which boxes of each logical tensor."""

    def __init__(self, sources: Sequence[RankPlacements]) -> None:
        self._holders: dict[str, dict[Box, dict[int, Placement]]] = defaultdict(dict)
        self._of_rank: dict[tuple[int, str], list[Box]] = defaultdict(list)
        for source in sources:
            for placement in source.placements:
                holders = self._holders[placement.tensor].setdefault(placement.box, {})
                if source.rank not in holders:
                    holders[source.rank] = placement
                    self._of_rank[source.rank, placement.tensor].append(placement.box)
        self._sorted = {tensor: sorted(boxes) for tensor, boxes in self._holders.items()}
        self._cuts: dict[tuple[str, Box, tuple[Box, ...]], _Cut] = {}

    def holders(self, tensor: str, box: Box) -> dict[int, Placement]:
        return self._holders[tensor][box]

    def cut(self, rank: int, wanted: Placement) -> _Cut:
        """The wanted box cut along the source boxes, those of the rank itself first.

        Replicas of an engine or of data parallelism ask for the same boxes, hence the memory.
        """
        own = tuple(sorted(self._of_rank.get((rank, wanted.tensor), ())))
        key = (wanted.tensor, wanted.box, own)
        if key not in self._cuts:
            self._cuts[key] = _cut(wanted.box, (*own, *self._sorted.get(wanted.tensor, ())))
        return self._cuts[key]


def _cut(wanted: Box, boxes: Sequence[Box]) -> _Cut:
    pieces = []
    rest = [wanted]
    for box in boxes:
        if wanted.intersect(box) is None:
            continue
        left = []
        for open_box in rest:
            hit = open_box.intersect(box)
            if hit is None:
                left.append(open_box)
            else:
                pieces.append((hit, box))
                left += open_box.minus(hit)
        rest = left
        if not rest:
            break
    return _Cut(pieces, rest)


def _by_tensor(destinations: Sequence[RankPlacements]) -> Iterator[tuple[int, Placement]]:
    """Placements tensor by tensor (in order of first appearance), then by rank: spreads the load evenly."""
    tensors: dict[str, list[tuple[int, Placement]]] = defaultdict(list)
    for destination in destinations:
        for placement in destination.placements:
            tensors[placement.tensor].append((destination.rank, placement))
    for wanted in tensors.values():
        yield from wanted


def _by_rank(parts: Sequence[RankPlacements], what: str) -> list[RankPlacements]:
    ranks = [part.rank for part in parts]
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(f"{what} name ranks {twice} more than once; merge the parts of a rank with merge_ranks")
    return sorted(parts, key=lambda part: part.rank)


def _check_shapes(parts: Sequence[RankPlacements]) -> None:
    shapes: dict[str, tuple[int, Shape]] = {}
    for part in parts:
        for tensor, shape in part.tensors.items():
            rank, known = shapes.setdefault(tensor, (part.rank, shape))
            if known != shape:
                raise ValueError(
                    f"{tensor} has shape {known} on rank {rank} and {shape} on rank {part.rank}; source and "
                    "destination must be the same model: compare their config.json"
                )


def _exchange(rounds: RankRound, sends: dict[int, list[Copy]], receives: dict[int, list[Copy]]) -> Exchange:
    return Exchange(
        {peer: _stream(sends[peer], spans) for peer, spans in rounds.sends.items()},
        {peer: _stream(receives[peer], spans) for peer, spans in rounds.receives.items()},
    )


def _stream(copies: Sequence[Copy], spans: Sequence[Span]) -> list[Copy]:
    """The parts of a pair's copies that lie in the spans of its stream."""
    out: list[Copy] = []
    spans = list(spans)
    at = 0
    for copy in copies:
        for start, stop in spans:
            a, b = max(start - at, 0), min(stop - at, copy.numel)
            if a < b:
                out += copy.part(a, b)
        at += copy.numel
    return out


def _slices(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def _raise_missing(missing: Sequence[str]) -> None:
    unique = list(dict.fromkeys(missing))
    more = f" and {len(unique) - _MAX_LISTED} more" if len(unique) > _MAX_LISTED else ""
    raise ValueError(
        f"the sources lack {len(unique)} boxes that the destinations need: "
        f"{', '.join(unique[:_MAX_LISTED])}{more}; "
        "pass the placements of every source rank, of the same model"
    )
