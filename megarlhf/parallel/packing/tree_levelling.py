"""Parts of trees in the micro-batches of ranks: those that meet are joined, and the costliest rank hands over.

A *tree* is a beginning that sequences share and the continuations of it. A *part* is continuations of a tree that are
computed together, with a copy of the beginning. Tokens are sizes, costs prices in whole units (`bins.py`).
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.parallel.packing.bins import MAX_PARTNERS, MAX_ROUNDS, Bins, costliest_first, exchange

Entry = tuple[int, tuple[int, ...]]
"""A group, and which of its sequences."""
Packed = list[list[list[Entry]]]
"""[rank][micro-batch]."""

TOLERANCE = 1_000
"""The costliest rank may stay 1/TOLERANCE above the mean: for less than that no beginning is computed twice."""
MAX_WORK = 300_000
"""Bound on handing over continuations, in continuations looked at: about half a second."""


@dataclass(frozen=True)
class Tree:
    """A beginning and what continues it. What may not be divided, and a plain sequence, continues nothing."""

    group: int
    members: tuple[tuple[int, ...], ...]
    """By continuation, the sequences of the group that it stands for."""
    tokens: int
    price: int
    """Of the beginning."""
    continuation_tokens: tuple[int, ...]
    continuation_prices: tuple[int, ...]
    unshared_prices: tuple[int, ...]
    """By continuation, of its sequences without sharing."""

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(range(len(self.members)))

    def tokens_of(self, continuations: Sequence[int]) -> int:
        """With the beginning."""
        return self.tokens + sum(self.continuation_tokens[n] for n in continuations)

    def price_of(self, continuations: Sequence[int]) -> int:
        """With the beginning."""
        return self.price + sum(self.continuation_prices[n] for n in continuations)


@dataclass(frozen=True)
class TreePart:
    """Continuations of a tree that are computed together."""

    tree: int
    continuations: tuple[int, ...]


@dataclass(frozen=True)
class LevelledPacking:
    """A way to pack, and what it costs."""

    packed: Packed
    costliest_rank: int
    total: int
    micro_batches: int

    def worse(self, share: int) -> tuple[int, int, int, int]:
        """The less the better. Costs of the costliest rank that differ by less than 1/TOLERANCE of `share`, a rank's of
        the work, count as equal: then the total decides."""
        rough = -(-self.costliest_rank * TOLERANCE // max(share, 1))
        return rough, self.total, self.micro_batches, self.costliest_rank


@dataclass(frozen=True)
class _HandOver:
    """Continuations of a part that go to another bin: the costlier of the two teams costs `peak` then."""

    peak: int
    extra: int
    """What a copy of the beginning costs there; 0: one is there."""
    part: int
    source: int
    target: int
    continuations: tuple[int, ...]
    amount: int


class Levelling:
    """Parts in bins of ranks, being made more equal. `outcomes` are those that were the best when they were found."""

    def __init__(self, trees: Sequence[Tree], parts: Sequence[TreePart], bins: Bins, ranks: list[list[int]]) -> None:
        self.trees, self.parts, self.bins, self.ranks = trees, list(parts), bins, ranks
        self.outcomes: list[LevelledPacking] = []

    def improve(self) -> None:
        """Fill `outcomes`."""
        share = -(-sum(tree.price_of(tree.all) for tree in self.trees) // len(self.ranks))
        self.join()
        self.keep()
        for _ in range(MAX_ROUNDS):
            if not self.hand_over(self.ranks, share):
                break
            self.join()
            self.keep()
            if not exchange(self.bins, self.ranks):
                break
            self.join()
            self.keep()

    def outcome(self) -> LevelledPacking:
        """As it stands, the micro-batches of each rank more equal. Costliest micro-batches first, and within one the
        longest entries."""
        for rank in filter(None, self.ranks):
            mean = -(-sum(self.bins.costs[number] for number in rank) // len(rank))
            self.hand_over([[number] for number in rank], mean, copies=False)
        costs = [sum(self.bins.costs[number] for number in rank) for rank in self.ranks]
        costliest_first(self.bins, self.ranks)
        packed = [[self._entries(number) for number in rank] for rank in self.ranks]
        return LevelledPacking(packed, max(costs), sum(costs), len(self.bins.costs))

    def _entries(self, number: int) -> list[Entry]:
        tokens: dict[int, int] = defaultdict(int)
        members: dict[int, list[int]] = defaultdict(list)
        for n in self.bins.members[number]:
            tree = self.trees[self.parts[n].tree]
            tokens[tree.group] += self.bins.sizes[n]
            for continuation in self.parts[n].continuations:
                members[tree.group] += tree.members[continuation]
        return [
            (group, tuple(sorted(members[group])))
            for group in sorted(members, key=lambda group: (-tokens[group], group))
        ]

    def keep(self) -> None:
        self.outcomes.append(self.outcome())

    def join(self) -> None:
        """Parts of a tree that are in one bin become one; those of one rank, where one of their bins has room."""
        for rank in self.ranks:
            places: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for number in rank:
                for n in self.bins.members[number]:
                    if len(self.trees[self.parts[n].tree].members) > 1:
                        places[self.parts[n].tree].append((n, number))
            for of_tree in places.values():
                while len(of_tree) > 1 and self._join_one(of_tree):
                    pass

    def _join_one(self, places: list[tuple[int, int]]) -> bool:
        """One of the parts that stand at these places goes into another; whether one could."""
        bins, beginning = self.bins, self.trees[self.parts[places[0][0]].tree].tokens
        for given, source in sorted(places, key=lambda place: bins.sizes[place[0]]):
            for taking, target in places:
                if taking == given:
                    continue
                fits = bins.tokens[target] + bins.sizes[given] - beginning <= bins.max_tokens
                if source == target or (fits and len(bins.members[source]) > 1):
                    self._shift(given, self.parts[given].continuations, source, target, taking)
                    places.remove((given, source))
                    return True
        return False

    def _shift(self, given: int, continuations: Sequence[int], source: int, target: int, taking: int | None) -> None:
        """Continuations of part `given` go from one bin to another, there into part `taking` or a new one."""
        bins, tree = self.bins, self.trees[self.parts[given].tree]
        if taking is None:
            taking = len(self.parts)
            self.parts.append(TreePart(self.parts[given].tree, ()))
            bins.sizes.append(tree.tokens)
            bins.prices.append(tree.price)
            bins.members[target].append(taking)
            bins.tokens[target] += tree.tokens
            bins.costs[target] += tree.price
        for part, number, chosen in (
            (given, source, [n for n in self.parts[given].continuations if n not in continuations]),
            (taking, target, [*self.parts[taking].continuations, *continuations]),
        ):
            size, price = tree.tokens_of(chosen), tree.price_of(chosen)
            bins.tokens[number] += size - bins.sizes[part]
            bins.costs[number] += price - bins.prices[part]
            bins.sizes[part], bins.prices[part] = size, price
            self.parts[part] = TreePart(self.parts[part].tree, tuple(sorted(chosen)))
        if not self.parts[given].continuations:
            bins.members[source].remove(given)
            bins.tokens[source] -= tree.tokens
            bins.costs[source] -= tree.price

    def hand_over(self, teams: list[list[int]], share: int, copies: bool = True) -> int:
        """The costliest team of bins hands continuations to cheaper ones, until that lowers its cost no more, or it is
        within 1/TOLERANCE of `share`. Returns how often.

        Without `copies` only to where their beginning is: then nothing is computed that was not, and nothing is kept.
        """
        order = sorted((sum(self.bins.costs[number] for number in team), place) for place, team in enumerate(teams))
        work, times, kept = MAX_WORK, 0, order[-1][0]
        while len(order) > 1 and work > 0 and (order[-1][0] - share) * TOLERANCE > share:
            total, place = order.pop()
            found: _HandOver | None = None
            for least, partner in order[:MAX_PARTNERS]:
                work -= sum(len(self.parts[n].continuations) for b in teams[place] for n in self.bins.members[b])
                better = self._find(teams[place], teams[partner], total, least, copies)
                if better is not None and (found is None or (better.peak, better.extra) < (found.peak, found.extra)):
                    found, chosen = better, (least, partner)
            if found is None or (total - found.peak) * TOLERANCE * 10 < total:
                break
            self._apply(found)
            times += 1
            order.remove(chosen)
            for team in (place, chosen[1]):
                insort(order, (sum(self.bins.costs[number] for number in teams[team]), team))
            if copies and (kept - order[-1][0]) * TOLERANCE > kept:
                self.keep()
                kept = order[-1][0]
        return times

    def _apply(self, found: _HandOver) -> None:
        tree = self.parts[found.part].tree
        taking = next((n for n in self.bins.members[found.target] if self.parts[n].tree == tree), None)
        self._shift(found.part, found.continuations, found.source, found.target, taking)

    def _find(self, heavy: list[int], light: list[int], total: int, least: int, copies: bool) -> _HandOver | None:
        """What levels two teams best; None: nothing lowers the costlier one's cost."""
        bins, best = self.bins, None
        has = {self.parts[n].tree: number for number in light for n in bins.members[number]}
        emptiest = min(light, key=lambda number: (bins.tokens[number], number))
        for source in heavy:
            for n in bins.members[source]:
                part = self.parts[n]
                tree = self.trees[part.tree]
                if len(tree.members) == 1 or (len(part.continuations) == 1 and len(bins.members[source]) == 1):
                    continue
                target = has.get(part.tree, emptiest)
                joined = part.tree in has
                if not (joined or copies):
                    continue
                extra, room = (0, 0) if joined else (tree.price, tree.tokens)
                wanted = (total - least - extra) // 2
                room = bins.max_tokens - bins.tokens[target] - room
                whole = joined and len(bins.members[source]) > 1
                chosen, amount = _near(tree, part.continuations, wanted, room, whole)
                if not chosen:
                    continue
                freed = amount + (tree.price if len(chosen) == len(part.continuations) else 0)
                peak = max(total - freed, least + amount + extra)
                if peak < total and (best is None or (peak, extra) < (best.peak, best.extra)):
                    best = _HandOver(peak, extra, n, source, target, tuple(chosen), amount)
        return best


def _near(tree: Tree, continuations: Sequence[int], wanted: int, room: int, whole: bool) -> tuple[list[int], int]:
    """Continuations that fit into `room` tokens and cost about `wanted`, all of them only where `whole`; and what they
    cost. Costliest first, as long as they cost no more; or the cheapest alone that costs more."""
    prices, tokens = tree.continuation_prices, tree.continuation_tokens
    most = len(continuations) if whole else len(continuations) - 1
    chosen: list[int] = []
    amount = size = 0
    over: int | None = None
    for n in sorted(continuations, key=lambda n: (-prices[n], n)):
        if amount + prices[n] <= wanted and size + tokens[n] <= room and len(chosen) < most and prices[n]:
            chosen.append(n)
            amount += prices[n]
            size += tokens[n]
        elif prices[n] > wanted and tokens[n] <= room:
            over = n
    if over is not None and most and prices[over] - wanted < wanted - amount:
        return [over], prices[over]
    return chosen, amount
