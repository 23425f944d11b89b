"""When each byte of a plan travels: rounds in which no rank sends or receives more than a bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarlhf.weights.plan.copy_plan import Pair

ElementRange = tuple[int, int]
"""A range [start, stop) of the elements that a pair of ranks exchanges, in the plan's order."""

_PIECES_PER_BUCKET = 8
_COARSE_ROUNDS = 64
"""Pieces are fitted one by one in Python: of every rank some 512, however small the bucket."""


@dataclass(frozen=True, slots=True)
class RankRound:
    """Messages of one rank in one round, by peer in ascending order."""

    sends: dict[int, tuple[ElementRange, ...]]
    receives: dict[int, tuple[ElementRange, ...]]


def rank_rounds(traffic: Mapping[Pair, int], rank: int, capacity: int) -> list[RankRound]:
    """The rounds of `rank`, in order, without those in which it has nothing to do.

    Every rank computes the same schedule from the same traffic (elements per pair) and walks its rounds in
    ascending order; both ends of a pair name the same ranges in the same round, so nothing can deadlock. Each
    piece takes the first round with room at both ends. Where that would be very many rounds, rounds of several
    times the capacity are filled in this way, and each is cut into as many equal ones.
    """
    cuts, large = _coarsened(traffic, capacity)
    sends: dict[int, dict[int, list[ElementRange]]] = defaultdict(lambda: defaultdict(list))
    receives: dict[int, dict[int, list[ElementRange]]] = defaultdict(lambda: defaultdict(list))
    for (src, dst), number, elements in _first_fit(traffic, large):
        if src == rank:
            sends[number][dst].append(elements)
        elif dst == rank:
            receives[number][src].append(elements)
    rounds = [
        RankRound(_cut(sends.get(number, {}), cut, cuts), _cut(receives.get(number, {}), cut, cuts))
        for number in sorted(sends.keys() | receives.keys())
        for cut in range(cuts)
    ]
    return [round for round in rounds if round.sends or round.receives]


def _coarsened(traffic: Mapping[Pair, int], capacity: int) -> tuple[int, int]:
    """Number of rounds into which each round of a first fit is cut, and the capacity of the fit's rounds."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    peers: dict[int, int] = defaultdict(int)
    for (src, dst), numel in traffic.items():
        if src != dst:
            sent[src] += numel
            received[dst] += numel
            peers[src] += 1
            peers[dst] += 1
    # Every pair of a round is cut at whole elements: each may give one more than its share.
    room = capacity - max(peers.values(), default=0)
    busiest = max((*sent.values(), *received.values()), default=0)
    cuts = busiest // (room * _COARSE_ROUNDS) if room > 0 else 0
    return (cuts, cuts * room) if cuts > 1 else (1, capacity)


def _first_fit(traffic: Mapping[Pair, int], capacity: int) -> list[tuple[Pair, int, ElementRange]]:
    piece = max(1, capacity // _PIECES_PER_BUCKET)
    ranks = 1 + max((max(pair) for pair in traffic), default=0)
    sent: dict[int, list[int]] = defaultdict(list)
    received: dict[int, list[int]] = defaultdict(list)
    out = []
    # Pairs one shift apart come together, so that early rounds keep every rank busy.
    for pair in sorted((p for p in traffic if p[0] != p[1]), key=lambda p: ((p[1] - p[0]) % ranks, p)):
        src, dst = sent[pair[0]], received[pair[1]]
        number = 0
        for start in range(0, traffic[pair], piece):
            stop = min(start + piece, traffic[pair])
            size = stop - start
            while True:
                for used in (src, dst):
                    used.extend([0] * (number + 1 - len(used)))
                if src[number] + size <= capacity and dst[number] + size <= capacity:
                    break
                number += 1
            src[number] += size
            dst[number] += size
            out.append((pair, number, (start, stop)))
    return out


def _cut(peers: Mapping[int, Sequence[ElementRange]], cut: int, cuts: int) -> dict[int, tuple[ElementRange, ...]]:
    """The given one of equal parts of each peer's ranges, adjacent ranges as one; peers ascending."""
    parts = {}
    for peer in sorted(peers):
        numel = sum(stop - start for start, stop in peers[peer])
        if ranges := _between(peers[peer], numel * cut // cuts, numel * (cut + 1) // cuts):
            parts[peer] = ranges
    return parts


def _between(ranges: Sequence[ElementRange], first: int, last: int) -> tuple[ElementRange, ...]:
    """Elements [first, last) of those in the ranges."""
    out: list[ElementRange] = []
    at = 0
    for start, stop in ranges:
        a, b = start + max(first - at, 0), start + min(last - at, stop - start)
        if a < b:
            if out and out[-1][1] == a:
                a = out.pop()[0]
            out.append((a, b))
        at += stop - start
    return tuple(out)
