"""Bin packing: as few bins of a capacity as possible, then bins and ranks of nearly equal cost.

Pure integers, and the same on every rank. Bins are micro-batches, items are groups of sequences (or parts of trees),
and the capacity is a number of tokens.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass

COST_BITS = 40
"""Bits of the greatest cost as an integer. Sums of integers do not depend on their order."""
BALANCE_TOLERANCE = 10_000
"""Total costs within 1/BALANCE_TOLERANCE of each other count as equal."""
MAX_PARTNERS = 8
"""Number of the cheapest teams with which a costly one tries to exchange."""
MAX_CANDIDATES = 16
"""Number of the cheapest bins that are tried before the first bin with room is taken."""
MAX_ROUNDS = 4
"""Rounds in which ranks exchange bins and then items, as long as something changes."""
MAX_WORK = 600_000
"""Bound on one call of `Bins.level`, in items looked at: about a second."""


def to_integers(costs: list[float]) -> list[int]:
    """Costs as integers, scaled by a power of two such that the greatest has COST_BITS bits."""
    shift = shift_of(max(costs, default=1.0))
    return [to_integer(cost, shift) for cost in costs]


def shift_of(greatest: float) -> int:
    """The power of two by which costs become integers of COST_BITS bits at most."""
    return COST_BITS - math.frexp(greatest)[1]


def to_integer(cost: float, shift: int) -> int:
    return round(math.ldexp(cost, shift))


def pack_balanced(
    tokens: list[int], costs: list[int], max_tokens: int, num_ranks: int, fewest: list[list[int]] | None = None
) -> tuple[Bins, list[list[int]]]:
    """Pack items into bins of nearly equal cost. Returns the bins, and the bins of each rank.

    fewest: a packing into few bins; None: `first_fit_decreasing`. The number of bins is this packing's, rounded up to a
        multiple of the ranks.
    """
    fewest = first_fit_decreasing(tokens, max_tokens) if fewest is None else fewest
    num_bins = -(-len(fewest) // num_ranks) * num_ranks
    even = longest_processing_time_first(tokens, costs, max_tokens, num_bins)
    bins = Bins(tokens, costs, max_tokens, even or _split_costliest(fewest, costs, num_bins))
    bins.level([[n] for n in range(num_bins)])
    ranks = _to_ranks(bins.costs, num_ranks)
    for _ in range(MAX_ROUNDS):
        if not balance_ranks(bins, ranks):
            break
    return bins, ranks


def balance_ranks(bins: Bins, ranks: list[list[int]]) -> int:
    """Make total costs of ranks more equal by exchanging bins, then items. Returns the number of exchanges."""
    # Ranks are full bins of items of size 1, which can only be swapped.
    whole_bins = Bins([1] * len(bins.costs), bins.costs, len(ranks[0]), ranks)
    return whole_bins.level([[rank] for rank in range(len(ranks))]) + bins.level(ranks)


def costliest_first(bins: Bins, ranks: list[list[int]]) -> None:
    """Sort the bins of each rank by falling cost, so that ranks run similar ones at the same time."""
    for rank in ranks:
        rank.sort(key=lambda n: -bins.costs[n])


class BinCapacities:
    """Free tokens in a row of bins, as a binary tree of maxima."""

    def __init__(self, num_bins: int, max_tokens: int) -> None:
        self.width = 1 << max(num_bins - 1, 0).bit_length()
        self.tree = [0] * self.width + [max_tokens] * num_bins + [0] * (self.width - num_bins)
        for node in range(self.width - 1, 0, -1):
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])

    def first(self, tokens: int) -> int | None:
        """The first bin with room for `tokens`."""
        tree, node = self.tree, 1
        if tree[1] < tokens:
            return None
        while node < self.width:
            node *= 2
            if tree[node] < tokens:
                node += 1
        return node - self.width

    @property
    def most(self) -> int:
        """Free tokens of the emptiest bin."""
        return self.tree[1]

    def room(self, n: int) -> int:
        """Free tokens of bin `n`."""
        return self.tree[self.width + n]

    def take(self, n: int, tokens: int) -> None:
        """Fill `tokens` of bin `n`."""
        tree, node = self.tree, self.width + n
        tree[node] -= tokens
        while node > 1:
            node //= 2
            greatest = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == greatest:
                return
            tree[node] = greatest


def first_fit_decreasing(tokens: list[int], max_tokens: int) -> list[list[int]]:
    """Pack the longest item first, each into the first bin with room. Takes at most 11/9 of the fewest bins + 6/9 (Dosa
    2007)."""
    free = BinCapacities(len(tokens), max_tokens)
    bins: list[list[int]] = []
    for item in sorted(range(len(tokens)), key=lambda item: -tokens[item]):
        n = free.first(tokens[item])
        assert n is not None, f"{len(tokens)} bins of {max_tokens} tokens have no room for {tokens[item]}"
        if n == len(bins):
            bins.append([])
        bins[n].append(item)
        free.take(n, tokens[item])
    return bins


def longest_processing_time_first(
    tokens: list[int], costs: list[int], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Pack the costliest item first, each into the cheapest bin with room.

    None when an item finds no room, which may happen with a tight capacity.
    """
    free = BinCapacities(num_bins, max_tokens)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    totals = [0] * num_bins
    queue = [(0, 0, n) for n in range(num_bins)]  # (cost, items, bin); entries with an old number of items are stale
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], -tokens[item])):
        full: list[tuple[int, int, int]] = []
        chosen = None
        while queue and chosen is None and len(full) < MAX_CANDIDATES:
            entry = heapq.heappop(queue)
            if entry[1] != len(bins[entry[2]]):
                continue
            if free.room(entry[2]) >= tokens[item]:
                chosen = entry[2]
            else:
                full.append(entry)
        if chosen is None:
            chosen = free.first(tokens[item])
        if chosen is None:
            return None
        bins[chosen].append(item)
        totals[chosen] += costs[item]
        free.take(chosen, tokens[item])
        heapq.heappush(queue, (totals[chosen], len(bins[chosen]), chosen))
        for entry in full:
            heapq.heappush(queue, entry)
    return bins


def _split_costliest(bins: list[list[int]], costs: list[int], num_bins: int) -> list[list[int]]:
    """Split the costliest bins of two or more items in halves of similar cost, until there are `num_bins` bins."""
    bins = [list(items) for items in bins]
    queue = [(-sum(costs[item] for item in items), n) for n, items in enumerate(bins) if len(items) > 1]
    heapq.heapify(queue)
    while len(bins) < num_bins and queue:
        _, n = heapq.heappop(queue)
        halves: tuple[list[int], list[int]] = ([], [])
        totals = [0, 0]
        for item in sorted(bins[n], key=lambda item: (-costs[item], item)):
            half = 0 if (totals[0], len(halves[0])) <= (totals[1], len(halves[1])) else 1
            halves[half].append(item)
            totals[half] += costs[item]
        bins[n] = halves[0]
        bins.append(halves[1])
        for items, total, where in zip(halves, totals, (n, len(bins) - 1), strict=True):
            if len(items) > 1:
                heapq.heappush(queue, (-total, where))
    return bins + [[] for _ in range(num_bins - len(bins))]


def _to_ranks(costs: list[int], num_ranks: int) -> list[list[int]]:
    """Give each rank the same number of bins. Bins are dealt in rounds by falling cost; in a round the cheapest rank so
    far gets the costliest bin."""
    order = sorted(range(len(costs)), key=lambda n: -costs[n])
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        cheapest = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, n in zip(cheapest, order[start : start + num_ranks], strict=True):
            ranks[rank].append(n)
            totals[rank] += costs[n]
    return ranks


@dataclass(frozen=True)
class _Exchange:
    """Move item `given` from bin `source` to bin `target`, and item `taken`, if any, back."""

    amount: int
    """Cost that moves to the target."""
    given: int
    source: int
    target: int
    taken: int | None


class Bins:
    """Bins of items. Their contents change, their number does not."""

    def __init__(
        self, item_tokens: list[int], item_costs: list[int], max_tokens: int, members: list[list[int]]
    ) -> None:
        """`members`: the items of each bin."""
        self.item_tokens, self.item_costs, self.max_tokens, self.members = item_tokens, item_costs, max_tokens, members
        self.tokens = [sum(item_tokens[item] for item in items) for items in members]
        self.costs = [sum(item_costs[item] for item in items) for items in members]

    def level(self, teams: list[list[int]]) -> int:
        """Make total costs of teams of bins more equal: the costliest team exchanges items with the cheapest ones.

        A team that finds no exchange is left as it is. Returns the number of exchanges.
        """
        order = sorted((sum(self.costs[n] for n in bins), team) for team, bins in enumerate(teams))
        work, exchanges = MAX_WORK, 0
        while len(order) > 1 and work > 0 and (order[-1][0] - order[0][0]) * BALANCE_TOLERANCE > order[-1][0]:
            cost, team = order.pop()
            if sum(len(self.members[n]) for n in teams[team]) == 1:
                continue
            for index, (partner_cost, partner) in enumerate(order[:MAX_PARTNERS]):
                work -= sum(len(self.members[n]) for n in teams[team] + teams[partner])
                exchange = self._find(teams[team], teams[partner], cost - partner_cost)
                if exchange is not None:
                    self._apply(exchange)
                    exchanges += 1
                    del order[index]
                    insort(order, (cost - exchange.amount, team))
                    insort(order, (partner_cost + exchange.amount, partner))
                    break
        return exchanges

    def _find(self, heavy: list[int], light: list[int], gap: int) -> _Exchange | None:
        """The exchange that brings two teams, `gap` apart, closest to each other. None: none brings them closer."""
        wanted = gap // 2
        best = min(wanted, gap - wanted)  # distance from `wanted`; at this one, nothing or everything would move
        exchange = None
        costs, tokens = self.item_costs, self.item_tokens
        takers = sorted((costs[item], item, n) for n in light for item in self.members[n])
        hosts = sorted(light, key=lambda n: (self.costs[n], n))
        for source in heavy:
            for given in self.members[source]:
                if abs(costs[given] - wanted) < best and len(self.members[source]) > 1:  # no bin is left empty
                    target = next((n for n in hosts if self.tokens[n] + tokens[given] <= self.max_tokens), None)
                    if target is not None:
                        best = abs(costs[given] - wanted)
                        exchange = _Exchange(costs[given], given, source, target, None)
                middle = bisect_left(takers, (costs[given] - wanted,))
                for nearest in (range(middle, len(takers)), range(middle - 1, -1, -1)):
                    for index in nearest[:MAX_PARTNERS]:
                        cost, taken, target = takers[index]
                        distance = abs(costs[given] - cost - wanted)
                        if distance >= best:
                            break
                        growth = tokens[given] - tokens[taken]
                        if max(self.tokens[target] + growth, self.tokens[source] - growth) <= self.max_tokens:
                            best = distance
                            exchange = _Exchange(costs[given] - cost, given, source, target, taken)
                            break
                if best * 16 <= gap and exchange is not None:
                    return exchange
        return exchange

    def _apply(self, exchange: _Exchange) -> None:
        self._move(exchange.given, exchange.source, exchange.target)
        if exchange.taken is not None:
            self._move(exchange.taken, exchange.target, exchange.source)

    def _move(self, item: int, source: int, target: int) -> None:
        for n, sign in ((source, -1), (target, 1)):
            self.tokens[n] += sign * self.item_tokens[item]
            self.costs[n] += sign * self.item_costs[item]
        self.members[source].remove(item)
        self.members[target].append(item)
