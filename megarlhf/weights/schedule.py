"""When each byte of a plan travels: rounds in which no rank sends or receives more than a bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

Pair = tuple[int, int]
"""(source rank, destination rank)."""
Span = tuple[int, int]
"""A range [start, stop) of a pair's stream: all elements it exchanges, in the plan's order."""

_CHUNKS_PER_BUCKET = 8


@dataclass(frozen=True, slots=True)
class RankRound:
    """What one rank exchanges in one round, by peer in ascending order."""

    sends: dict[int, tuple[Span, ...]]
    receives: dict[int, tuple[Span, ...]]


def rank_rounds(traffic: Mapping[Pair, int], rank: int, capacity: int) -> list[RankRound]:
    """The rounds of `rank`, in order, without those in which it has nothing to do.

    Every rank computes the same schedule from the same traffic (elements per pair) and walks its rounds in
    ascending order; both ends of a pair name the same spans in the same round, so nothing can deadlock. Each
    chunk takes the first round with room at both ends.
    """
    sends: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    receives: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for (src, dst), number, span in _first_fit(traffic, capacity):
        if src == rank:
            sends[number][dst].append(span)
        elif dst == rank:
            receives[number][src].append(span)
    return [
        RankRound(_joined(sends.get(number, {})), _joined(receives.get(number, {})))
        for number in sorted(sends.keys() | receives.keys())
    ]


def _first_fit(traffic: Mapping[Pair, int], capacity: int) -> list[tuple[Pair, int, Span]]:
    chunk = max(1, capacity // _CHUNKS_PER_BUCKET)
    ranks = 1 + max((max(pair) for pair in traffic), default=0)
    sent: dict[int, list[int]] = defaultdict(list)
    received: dict[int, list[int]] = defaultdict(list)
    out = []
    # Pairs one shift apart come together, so that early rounds keep every rank busy.
    for pair in sorted((p for p in traffic if p[0] != p[1]), key=lambda p: ((p[1] - p[0]) % ranks, p)):
        src, dst = sent[pair[0]], received[pair[1]]
        number = 0
        for start in range(0, traffic[pair], chunk):
            stop = min(start + chunk, traffic[pair])
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


def _joined(peers: Mapping[int, list[Span]]) -> dict[int, tuple[Span, ...]]:
    """Adjacent spans as one, peers ascending."""
    result = {}
    for peer in sorted(peers):
        spans = [peers[peer][0]]
        for start, stop in peers[peer][1:]:
            if start == spans[-1][1]:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        result[peer] = tuple(spans)
    return result
