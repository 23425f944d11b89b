"""Items of a size and a price in bins of a capacity: as few bins as can be found, then prices as equal as can be.

Pure integers, and the same on every rank. Bins are micro-batches, sizes tokens, prices what a forward costs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass

COST_BITS = 40
"""Of the costliest group in whole units. Sums of whole numbers do not depend on their order."""
BALANCE_TOLERANCE = 10_000
"""Totals within 1/BALANCE_TOLERANCE of each other are left as they are."""
MAX_PARTNERS = 8
"""How many of the lightest a heavy one tries to exchange with before it is left as it is."""
MAX_CANDIDATES = 16
"""How many of the cheapest micro-batches are asked for room before the first with room is taken."""
MAX_ROUNDS = 4
"""How often ranks exchange micro-batches and then groups, unless nothing changes any more."""
MAX_WORK = 600_000
"""Bound on one levelling, in groups looked at: about a second."""


def to_integers(costs: list[float]) -> list[int]:
    """`costs` in whole units, a power of two such that the greatest cost has COST_BITS bits."""
    shift = shift_of(max(costs, default=1.0))
    return [to_integer(cost, shift) for cost in costs]


def shift_of(greatest: float) -> int:
    """The power of two by which costs become whole units of COST_BITS bits at most."""
    return COST_BITS - math.frexp(greatest)[1]


def to_integer(cost: float, shift: int) -> int:
    return round(math.ldexp(cost, shift))


def balance(
    sizes: list[int], prices: list[int], capacity: int, fewest: list[list[int]], num_ranks: int
) -> tuple[Bins, list[list[int]]]:
    """Bins of like price, and those of each rank: as many as `fewest`, in which the items fit, rounded up to a multiple
    of the ranks."""
    num_bins = -(-len(fewest) // num_ranks) * num_ranks
    even = longest_processing_time_first(sizes, prices, capacity, num_bins)
    bins = Bins(sizes, prices, capacity, even or split_costliest(fewest, prices, num_bins))
    bins.level([[number] for number in range(num_bins)])
    ranks = to_ranks(bins.costs, num_ranks)
    for _ in range(MAX_ROUNDS):
        if not exchange(bins, ranks):
            break
    return bins, ranks


def exchange(bins: Bins, ranks: list[list[int]]) -> int:
    """Makes the total prices of ranks more equal by exchanges of bins, then of items; returns their number."""
    # Whole bins first: "items" of one "token" in "bins" that are full can only be swapped.
    whole = Bins([1] * len(bins.costs), bins.costs, len(ranks[0]), ranks)
    return whole.level([[rank] for rank in range(len(ranks))]) + bins.level(ranks)


def costliest_first(bins: Bins, ranks: list[list[int]]) -> None:
    """In the bins of each rank, so that those which ranks run at the same time are alike."""
    for rank in ranks:
        rank.sort(key=lambda number: -bins.costs[number])


class BinCapacities:
    """Tokens that still fit into each of a row of bins: a binary tree of maxima over it."""

    def __init__(self, num_bins: int, max_tokens: int) -> None:
        self.width = 1 << max(num_bins - 1, 0).bit_length()
        self.tree = [0] * self.width + [max_tokens] * num_bins + [0] * (self.width - num_bins)
        for node in range(self.width - 1, 0, -1):
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])

    def first(self, size: int) -> int | None:
        """The first bin with room for `size` tokens."""
        tree, node = self.tree, 1
        if tree[1] < size:
            return None
        while node < self.width:
            node *= 2
            if tree[node] < size:
                node += 1
        return node - self.width

    @property
    def most(self) -> int:
        """Room of the emptiest bin."""
        return self.tree[1]

    def of(self, number: int) -> int:
        return self.tree[self.width + number]

    def take(self, number: int, size: int) -> None:
        tree, node = self.tree, self.width + number
        tree[node] -= size
        while node > 1:
            node //= 2
            greatest = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == greatest:
                return
            tree[node] = greatest


def first_fit_decreasing(tokens: list[int], max_tokens: int) -> list[list[int]]:
    """At most 11/9 of the fewest bins, plus 6/9 (Dosa 2007)."""
    room = BinCapacities(len(tokens), max_tokens)
    bins: list[list[int]] = []
    for group in sorted(range(len(tokens)), key=lambda group: -tokens[group]):
        number = room.first(tokens[group])
        assert number is not None, f"{len(tokens)} bins of {max_tokens} tokens have no room for {tokens[group]}"
        if number == len(bins):
            bins.append([])
        bins[number].append(group)
        room.take(number, tokens[group])
    return bins


def longest_processing_time_first(
    tokens: list[int], costs: list[int], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Longest processing time first, under the budget: the costliest group to the cheapest bin that has room.

    None when a group finds no room: packed by cost, a tight budget may not do.
    """
    room = BinCapacities(num_bins, max_tokens)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    at = [0] * num_bins
    queue = [(0, 0, number) for number in range(num_bins)]  # (cost, groups, bin); those of an old cost are stale
    for group in sorted(range(len(costs)), key=lambda group: (-costs[group], -tokens[group])):
        passed: list[tuple[int, int, int]] = []
        chosen = None
        while queue and chosen is None and len(passed) < MAX_CANDIDATES:
            entry = heapq.heappop(queue)
            if entry[1] != len(bins[entry[2]]):
                continue
            if room.of(entry[2]) >= tokens[group]:
                chosen = entry[2]
            else:
                passed.append(entry)
        if chosen is None:
            chosen = room.first(tokens[group])
        if chosen is None:
            return None
        bins[chosen].append(group)
        at[chosen] += costs[group]
        room.take(chosen, tokens[group])
        heapq.heappush(queue, (at[chosen], len(bins[chosen]), chosen))
        for entry in passed:
            heapq.heappush(queue, entry)
    return bins


def split_costliest(bins: list[list[int]], costs: list[int], num_bins: int) -> list[list[int]]:
    """`num_bins` bins: the costliest that hold two groups or more are cut in halves of like cost."""
    bins = [list(groups) for groups in bins]
    queue = [(-sum(costs[g] for g in groups), number) for number, groups in enumerate(bins) if len(groups) > 1]
    heapq.heapify(queue)
    while len(bins) < num_bins and queue:
        _, number = heapq.heappop(queue)
        halves: tuple[list[int], list[int]] = ([], [])
        totals = [0, 0]
        for group in sorted(bins[number], key=lambda group: (-costs[group], group)):
            half = 0 if (totals[0], len(halves[0])) <= (totals[1], len(halves[1])) else 1
            halves[half].append(group)
            totals[half] += costs[group]
        bins[number] = halves[0]
        bins.append(halves[1])
        for place, half in ((number, 0), (len(bins) - 1, 1)):
            if len(halves[half]) > 1:
                heapq.heappush(queue, (-totals[half], place))
    return bins + [[] for _ in range(num_bins - len(bins))]


def to_ranks(costs: list[int], num_ranks: int) -> list[list[int]]:
    """As many bins for each rank: of every `num_ranks` in descending cost, the costliest goes to the cheapest rank."""
    order = sorted(range(len(costs)), key=lambda number: -costs[number])
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        cheapest = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, number in zip(cheapest, order[start : start + num_ranks], strict=True):
            ranks[rank].append(number)
            totals[rank] += costs[number]
    return ranks


@dataclass(frozen=True)
class _Exchange:
    """Group `given` of bin `source` goes to bin `target`, and `taken`, if any, comes back for it."""

    amount: int
    given: int
    source: int
    target: int
    taken: int | None


class Bins:
    """The micro-batches being levelled; their contents change, their number does not."""

    def __init__(self, sizes: list[int], prices: list[int], max_tokens: int, members: list[list[int]]) -> None:
        self.sizes, self.prices, self.max_tokens, self.members = sizes, prices, max_tokens, members
        self.tokens = [sum(sizes[group] for group in groups) for groups in members]
        self.costs = [sum(prices[group] for group in groups) for groups in members]

    def level(self, teams: list[list[int]]) -> int:
        """Makes the total costs of `teams` of bins more equal, by exchanges of the heaviest with the lightest.

        One that cannot exchange with any of the lightest is left as it is. Returns the number of exchanges.
        """
        order = sorted((sum(self.costs[number] for number in team), place) for place, team in enumerate(teams))
        work, exchanges = MAX_WORK, 0
        while len(order) > 1 and work > 0 and (order[-1][0] - order[0][0]) * BALANCE_TOLERANCE > order[-1][0]:
            total, place = order.pop()
            if sum(len(self.members[number]) for number in teams[place]) == 1:
                continue
            for other, (least, partner) in enumerate(order[:MAX_PARTNERS]):
                work -= sum(len(self.members[number]) for number in teams[place] + teams[partner])
                exchange = self.find(teams[place], teams[partner], total - least)
                if exchange is not None:
                    self.apply(exchange)
                    exchanges += 1
                    del order[other]
                    insort(order, (total - exchange.amount, place))
                    insort(order, (least + exchange.amount, partner))
                    break
        return exchanges

    def find(self, heavy: list[int], light: list[int], gap: int) -> _Exchange | None:
        """The move or swap that brings two teams `gap` apart closest to each other; None: none brings them closer."""
        wanted = gap // 2
        best = min(wanted, gap - wanted)  # how far off the best is; at `wanted` nothing or everything would be moved
        exchange = None
        prices, sizes = self.prices, self.sizes
        takers = sorted((prices[group], group, number) for number in light for group in self.members[number])
        hosts = sorted(light, key=lambda number: (self.costs[number], number))
        for source in heavy:
            for given in self.members[source]:
                if abs(prices[given] - wanted) < best and len(self.members[source]) > 1:  # or it would be left empty
                    target = next((n for n in hosts if self.tokens[n] + sizes[given] <= self.max_tokens), None)
                    if target is not None:
                        best = abs(prices[given] - wanted)
                        exchange = _Exchange(prices[given], given, source, target, None)
                middle = bisect_left(takers, (prices[given] - wanted,))
                for near in (range(middle, len(takers)), range(middle - 1, -1, -1)):
                    for place in near[:MAX_PARTNERS]:
                        price, taken, target = takers[place]
                        off = abs(prices[given] - price - wanted)
                        if off >= best:
                            break
                        if self.swappable(given, source, taken, target):
                            best = off
                            exchange = _Exchange(prices[given] - price, given, source, target, taken)
                            break
                if best * 16 <= gap and exchange is not None:
                    return exchange
        return exchange

    def swappable(self, given: int, source: int, taken: int, target: int) -> bool:
        growth = self.sizes[given] - self.sizes[taken]
        return self.tokens[target] + growth <= self.max_tokens and self.tokens[source] - growth <= self.max_tokens

    def apply(self, exchange: _Exchange) -> None:
        self.shift(exchange.given, exchange.source, exchange.target)
        if exchange.taken is not None:
            self.shift(exchange.taken, exchange.target, exchange.source)

    def shift(self, group: int, source: int, target: int) -> None:
        for number, sign in ((source, -1), (target, 1)):
            self.tokens[number] += sign * self.sizes[group]
            self.costs[number] += sign * self.prices[group]
        self.members[source].remove(group)
        self.members[target].append(group)
