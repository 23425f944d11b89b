"""What has to move: every wanted box cut along the boxes that the sources hold, and who may send each piece.

Layers of a model are cut alike, so that a cut is made once for each pattern of boxes and ranks and shared by all
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
Stream = tuple[Ranks, int]
"""(the ranks that may send, the rank that receives): all pieces of it, tensor by tensor, are one stream."""

NodeOf = Sequence[int] | Mapping[int, int]
"""Rank -> node."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a wanted box that one source box has."""

    box: Box
    numel: int
    row: int
    """Elements of one row (index of dim 0); a vector is one row, and is never cut."""
    dst_rank: int
    wanted: int
    """Position among the tensor's wanted placements."""
    holders: Mapping[int, int]
    """Rank -> position among the tensor's held placements, of all ranks that hold the source box."""
    stream: Stream | None
    """None when the destination holds the piece itself."""


@dataclass(frozen=True)
class Cuts:
    """All pieces of one pattern, by destination in the order of the wanted placements."""

    pieces: tuple[Piece, ...]
    missing: tuple[Box, ...]

    @cached_property
    def needs(self) -> Counter[Stream]:
        """Elements of each stream."""
        count: Counter[Stream] = Counter()
        for piece in self.pieces:
            if piece.stream is not None:
                count[piece.stream] += piece.numel
        return count

    @cached_property
    def local(self) -> Counter[int]:
        """Elements that a rank takes from itself."""
        count: Counter[int] = Counter()
        for piece in self.pieces:
            if piece.stream is None:
                count[piece.dst_rank] += piece.numel
        return count

    @cached_property
    def of_stream(self) -> dict[Stream, list[Piece]]:
        streams: dict[Stream, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            if piece.stream is not None:
                streams[piece.stream].append(piece)
        return dict(streams)

    def of_rank(self, rank: int | None) -> tuple[Piece, ...]:
        """The pieces that `rank` receives, has or may send; None: all of them."""
        if rank is None:
            return self.pieces
        return tuple(p for p in self.pieces if p.dst_rank == rank or (p.stream is not None and rank in p.stream[0]))


@dataclass(frozen=True, slots=True)
class TensorCuts:
    """A logical tensor: its held and wanted placements, and how the wanted ones are cut."""

    name: str
    held: list[Placement]
    wanted: list[Placement]
    cuts: Cuts


def cut_all(
    sources: Sequence[RankPlacements], destinations: Sequence[RankPlacements], node_of: NodeOf | None
) -> list[TensorCuts]:
    """The tensors that the destinations want, in the order in which they first name them.

    A rank's own boxes come first, then (with `node_of`) those of its node; only what is left comes from elsewhere.
    """
    held, wanted = by_tensor(sources), by_tensor(destinations)
    known: dict[object, Cuts] = {}
    nothing: tuple[list[int], list[Placement]] = ([], [])
    out = []
    for name, (ranks, placements) in wanted.items():
        held_ranks, held_placements = held.get(name, nothing)
        key = (
            tuple(held_ranks),
            tuple([p.box for p in held_placements]),
            tuple(ranks),
            tuple([p.box for p in placements]),
        )
        if key not in known:
            known[key] = _cut_pattern(*key, node_of)
        out.append(TensorCuts(name, held_placements, placements, known[key]))
    return out


def by_tensor(parts: Iterable[RankPlacements]) -> dict[str, tuple[list[int], list[Placement]]]:
    """Ranks and placements of each logical tensor."""
    tensors: dict[str, tuple[list[int], list[Placement]]] = {}
    for part in parts:
        rank = part.rank
        for placement in part.placements:
            known = tensors.get(placement.tensor)
            if known is None:
                known = tensors[placement.tensor] = ([], [])
            known[0].append(rank)
            known[1].append(placement)
    return tensors


def _cut_pattern(
    held_ranks: Ranks, held_boxes: tuple[Box, ...], ranks: Ranks, boxes: tuple[Box, ...], node_of: NodeOf | None
) -> Cuts:
    holders: dict[Box, dict[int, int]] = defaultdict(dict)
    for index, (rank, box) in enumerate(zip(held_ranks, held_boxes, strict=True)):
        holders[box].setdefault(rank, index)
    everywhere = sorted(holders)
    pieces, missing = [], []
    for index, (rank, wanted) in enumerate(zip(ranks, boxes, strict=True)):
        own = [box for box in everywhere if rank in holders[box]]
        near = []
        if node_of is not None:
            near = [box for box in everywhere if any(node_of[r] == node_of[rank] for r in holders[box])]
        found, rest = cut_box(wanted, (*own, *near, *everywhere))
        missing += rest
        for box, source in found:
            numel = box.numel
            row = numel // box.shape[0] if len(box.shape) > 1 else numel
            stream = None if rank in holders[source] else (_senders(holders[source], rank, node_of), rank)
            pieces.append(Piece(box, numel, row, rank, index, holders[source], stream))
    return Cuts(tuple(pieces), tuple(missing))


def _senders(holders: Mapping[int, int], rank: int, node_of: NodeOf | None) -> Ranks:
    if node_of is not None:
        near = [holder for holder in holders if node_of[holder] == node_of[rank]]
        if near:
            return tuple(sorted(near))
    return tuple(sorted(holders))


def cut_box(wanted: Box, boxes: Iterable[Box]) -> tuple[list[tuple[Box, Box]], list[Box]]:
    """The wanted box along `boxes`, the first of them that has an element having it: (part, the box that has it),
    and the boxes that none has."""
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
    return pieces, rest
