"""Division of equal copies among the ranks that hold them: equal loads, in contiguous parts."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from megarlhf.weights.plan.overlaps import Ranks

Key = TypeVar("Key", bound=Hashable)

SenderShare = tuple[int, int]
"""(rank, where its part of the route ends); parts follow each other."""


def balance_senders(
    needs: Mapping[Ranks, Mapping[Key, int]], snap: Callable[[Ranks, Key, int], int]
) -> dict[tuple[Ranks, Key], list[SenderShare]]:
    """The shares of the route of each (set of ranks, key), one after the other.

    The routes of a set, keys in the order given, are cut into one contiguous part per rank, so that a key meets
    few ranks. Sets with the fewest ranks have the least choice and come first; a rank that already carries more gets
    less. `snap(ranks, key, position)` is the position nearest to `position` at which the route may be cut; what
    that costs in balance, the next set of the same ranks makes good.
    """
    load: dict[int, int] = defaultdict(int)
    shares: dict[tuple[Ranks, Key], list[SenderShare]] = {}
    for ranks in sorted(needs, key=lambda r: (len(r), r)):
        keys = list(needs[ranks])
        ends = list(accumulate(needs[ranks][key] for key in keys))
        parts = water_fill([load[rank] for rank in ranks], ends[-1])
        cuts = []
        for position in list(accumulate(parts))[:-1]:
            index = min(bisect_right(ends, position), len(keys) - 1)
            start = ends[index] - needs[ranks][keys[index]]
            cuts.append(start + snap(ranks, keys[index], position - start))
        for rank, start, stop in zip(ranks, [0, *cuts], [*cuts, ends[-1]], strict=True):
            load[rank] += stop - start
            for key, end in zip(keys, ends, strict=True):
                begin = end - needs[ranks][key]
                if max(start, begin) < min(stop, end):
                    shares.setdefault((ranks, key), []).append((rank, min(stop, end) - begin))
    return shares


def water_fill(loads: Sequence[int], total: int) -> list[int]:
    """`total` in integer parts such that the largest of `loads` plus parts is as small as can be."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    below = 0
    for count, index in enumerate(order, start=1):
        below += loads[index]
        if count == len(order) or loads[order[count]] * count - below >= total:
            break
    level, extra = divmod(total + below, count)
    parts = [0] * len(loads)
    for place, index in enumerate(order[:count]):
        parts[index] = level - loads[index] + (place < extra)
    return parts
