"""Levelling of trees: parts that meet are joined, and the costliest rank hands continuations over to others.

A *tree* is a prefix that sequences share, with their continuations. A *part* is a set of continuations of one tree that
are computed together, with one copy of the prefix. Parts are the items of `bins.py`.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.parallel.packing.bins import MAX_PARTNERS, MAX_ROUNDS, Bins, balance_ranks, costliest_first

Entry = tuple[int, tuple[int, ...]]
"""(group, its sequences that are computed together)."""
Packed = list[list[list[Entry]]]
"""[rank][micro-batch] -> entries."""

TOLERANCE = 1_000
"""The costliest rank may stay 1/TOLERANCE above the mean: a smaller gain is not worth another copy of a prefix."""
MAX_WORK = 300_000
"""Bound on handing over continuations, in continuations looked at: about half a second."""


@dataclass(frozen=True)
class Tree:
    """A prefix and its continuations.

    An indivisible group, and a sequence without siblings, is a tree with an empty prefix and one continuation.

    Example: a divisible group 3 with a prefix of 10 tokens and sequences of 12 and 15 tokens has `group=3`,
    `members=((0,), (1,))`, `tokens=10` and `continuation_tokens=(2, 5)`."""

    group: int
    members: tuple[tuple[int, ...], ...]
    """For each continuation the sequences of the group that it stands for."""
    tokens: int
    cost: int
    """Cost of the prefix."""
    continuation_tokens: tuple[int, ...]
    continuation_costs: tuple[int, ...]
    unshared_costs: tuple[int, ...]
    """For each continuation the cost of its sequences without sharing."""

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(range(len(self.members)))

    @property
    def total_cost(self) -> int:
        return self.cost_of(self.all)

    def tokens_of(self, continuations: Sequence[int]) -> int:
        """Tokens of the prefix with these continuations."""
        return self.tokens + sum(self.continuation_tokens[n] for n in continuations)

    def cost_of(self, continuations: Sequence[int]) -> int:
        """Cost of the prefix with these continuations."""
        return self.cost + sum(self.continuation_costs[n] for n in continuations)


@dataclass(frozen=True)
class TreePart:
    """Continuations of a tree that are computed together."""

    tree: int
    continuations: tuple[int, ...]


@dataclass(frozen=True)
class LevelledPacking:
    """A packing and its cost."""

    packed: Packed
    costliest_rank: int
    total: int
    micro_batches: int

    def key(self, share: int) -> tuple[int, int, int, int]:
        """Sort key; less is better. Costs of the costliest rank that differ by less than 1/TOLERANCE of `share`, the
        mean cost of a rank, count as equal; then the total decides."""
        rough = -(-self.costliest_rank * TOLERANCE // max(share, 1))
        return rough, self.total, self.micro_batches, self.costliest_rank


@dataclass(frozen=True)
class _HandOver:
    """Continuations of a part that go to another bin."""

    peak: int
    """Cost of the costlier of the two teams afterwards."""
    extra: int
    """Cost of another copy of the prefix; 0: the target has one."""
    part: int
    source: int
    target: int
    continuations: tuple[int, ...]


class Levelling:
    """Parts in the bins of ranks, whose costs are being made more equal. `outcomes`: the packings found on the way."""

    def __init__(self, trees: Sequence[Tree], parts: Sequence[TreePart], bins: Bins, ranks: list[list[int]]) -> None:
        self.trees, self.parts, self.bins, self.ranks = trees, list(parts), bins, ranks
        self.outcomes: list[LevelledPacking] = []

    def improve(self) -> None:
        """Fill `outcomes`."""
        share = -(-sum(tree.total_cost for tree in self.trees) // len(self.ranks))
        self._join_and_keep()
        for _ in range(MAX_ROUNDS):
            if not self._hand_over(self.ranks, share):
                break
            self._join_and_keep()
            if not balance_ranks(self.bins, self.ranks):
                break
            self._join_and_keep()

    def _join_and_keep(self) -> None:
        self.join()
        self.outcomes.append(self.outcome())

    def outcome(self) -> LevelledPacking:
        """The current packing, after levelling the micro-batches of each rank. The costliest micro-batch comes first,
        and within one the longest entry."""
        for rank in filter(None, self.ranks):
            mean = -(-sum(self.bins.costs[n] for n in rank) // len(rank))
            self._hand_over([[n] for n in rank], mean, copies=False)
        costs = [sum(self.bins.costs[n] for n in rank) for rank in self.ranks]
        costliest_first(self.bins, self.ranks)
        packed = [[self._entries(n) for n in rank] for rank in self.ranks]
        return LevelledPacking(packed, max(costs), sum(costs), len(self.bins.costs))

    def _tree(self, part: int) -> Tree:
        return self.trees[self.parts[part].tree]

    def _entries(self, n: int) -> list[Entry]:
        tokens: dict[int, int] = defaultdict(int)
        members: dict[int, list[int]] = defaultdict(list)
        for part in self.bins.members[n]:
            tree = self._tree(part)
            tokens[tree.group] += self.bins.item_tokens[part]
            for continuation in self.parts[part].continuations:
                members[tree.group] += tree.members[continuation]
        return [
            (group, tuple(sorted(members[group])))
            for group in sorted(members, key=lambda group: (-tokens[group], group))
        ]

    def join(self) -> None:
        """Join parts of a tree that are in one bin, and parts in bins of one rank where one of the bins has room."""
        for rank in self.ranks:
            places_by_tree: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (part, bin)
            for n in rank:
                for part in self.bins.members[n]:
                    if len(self._tree(part).members) > 1:
                        places_by_tree[self.parts[part].tree].append((part, n))
            for places in places_by_tree.values():
                while len(places) > 1 and self._join_one(places):
                    pass

    def _join_one(self, places: list[tuple[int, int]]) -> bool:
        """Join one of these parts of a tree into another. Returns False if none could be."""
        bins, prefix = self.bins, self._tree(places[0][0]).tokens
        for given, source in sorted(places, key=lambda place: bins.item_tokens[place[0]]):
            for taking, target in places:
                if taking == given:
                    continue
                fits = bins.tokens[target] + bins.item_tokens[given] - prefix <= bins.max_tokens
                if source == target or (fits and len(bins.members[source]) > 1):
                    self._move(given, self.parts[given].continuations, source, target, taking)
                    places.remove((given, source))
                    return True
        return False

    def _move(self, given: int, continuations: Sequence[int], source: int, target: int, taking: int | None) -> None:
        """Move continuations of part `given` to another bin, into part `taking` there or into a new part."""
        bins, tree = self.bins, self._tree(given)
        if taking is None:
            taking = len(self.parts)
            self.parts.append(TreePart(self.parts[given].tree, ()))
            bins.item_tokens.append(tree.tokens)
            bins.item_costs.append(tree.cost)
            bins.members[target].append(taking)
            bins.tokens[target] += tree.tokens
            bins.costs[target] += tree.cost
        for part, n, changed in (
            (given, source, [c for c in self.parts[given].continuations if c not in continuations]),
            (taking, target, [*self.parts[taking].continuations, *continuations]),
        ):
            tokens, cost = tree.tokens_of(changed), tree.cost_of(changed)
            bins.tokens[n] += tokens - bins.item_tokens[part]
            bins.costs[n] += cost - bins.item_costs[part]
            bins.item_tokens[part], bins.item_costs[part] = tokens, cost
            self.parts[part] = TreePart(self.parts[part].tree, tuple(sorted(changed)))
        if not self.parts[given].continuations:
            bins.members[source].remove(given)
            bins.tokens[source] -= tree.tokens
            bins.costs[source] -= tree.cost

    def _hand_over(self, teams: list[list[int]], share: int, copies: bool = True) -> int:
        """Let the costliest team of bins hand continuations to cheaper teams, until its cost falls no more or is within
        1/TOLERANCE of `share`. Returns the number of times.

        Without `copies`, only to teams that have the prefix: then no prefix is computed again, and no outcome is kept.
        """
        order = sorted((sum(self.bins.costs[n] for n in bins), team) for team, bins in enumerate(teams))
        work, times, kept = MAX_WORK, 0, order[-1][0]
        while len(order) > 1 and work > 0 and (order[-1][0] - share) * TOLERANCE > share:
            cost, team = order.pop()
            num_looked_at = sum(
                len(self.parts[part].continuations) for n in teams[team] for part in self.bins.members[n]
            )
            best: _HandOver | None = None
            for entry in order[:MAX_PARTNERS]:
                work -= num_looked_at
                option = self._find(teams[team], teams[entry[1]], cost, entry[0], copies)
                if option is not None and (best is None or (option.peak, option.extra) < (best.peak, best.extra)):
                    best, partner = option, entry
            if best is None or (cost - best.peak) * TOLERANCE * 10 < cost:
                break
            tree = self.parts[best.part].tree
            taking = next((part for part in self.bins.members[best.target] if self.parts[part].tree == tree), None)
            self._move(best.part, best.continuations, best.source, best.target, taking)
            times += 1
            order.remove(partner)
            for changed in (team, partner[1]):
                insort(order, (sum(self.bins.costs[n] for n in teams[changed]), changed))
            if copies and (kept - order[-1][0]) * TOLERANCE > kept:
                self.outcomes.append(self.outcome())
                kept = order[-1][0]
        return times

    def _find(self, heavy: list[int], light: list[int], cost: int, light_cost: int, copies: bool) -> _HandOver | None:
        """The hand-over that levels two teams best. None: none lowers the cost of the costlier one."""
        bins, best = self.bins, None
        bin_with_tree = {self.parts[part].tree: n for n in light for part in bins.members[n]}
        emptiest = min(light, key=lambda n: (bins.tokens[n], n))
        for source in heavy:
            is_last = len(bins.members[source]) == 1
            for n in bins.members[source]:
                part, tree = self.parts[n], self._tree(n)
                joined = part.tree in bin_with_tree
                if len(tree.members) == 1 or (len(part.continuations) == 1 and is_last) or not (joined or copies):
                    continue
                target = bin_with_tree.get(part.tree, emptiest)
                extra, prefix = (0, 0) if joined else (tree.cost, tree.tokens)
                wanted = (cost - light_cost - extra) // 2
                room = bins.max_tokens - bins.tokens[target] - prefix
                chosen, amount = _near(tree, part.continuations, wanted, room, whole=joined and not is_last)
                if not chosen:
                    continue
                freed = amount + (tree.cost if len(chosen) == len(part.continuations) else 0)
                peak = max(cost - freed, light_cost + amount + extra)
                if peak < cost and (best is None or (peak, extra) < (best.peak, best.extra)):
                    best = _HandOver(peak, extra, n, source, target, tuple(chosen))
        return best


def _near(tree: Tree, continuations: Sequence[int], wanted: int, room: int, whole: bool) -> tuple[list[int], int]:
    """Continuations that fit into `room` tokens and cost about `wanted`, and their cost. All of them only if `whole`.

    They are the costliest ones that together cost no more, or the cheapest single one that costs more.
    """
    costs, tokens = tree.continuation_costs, tree.continuation_tokens
    most = len(continuations) if whole else len(continuations) - 1
    chosen: list[int] = []
    amount = size = 0
    costlier: int | None = None
    for n in sorted(continuations, key=lambda n: (-costs[n], n)):
        if amount + costs[n] <= wanted and size + tokens[n] <= room and len(chosen) < most and costs[n]:
            chosen.append(n)
            amount += costs[n]
            size += tokens[n]
        elif costs[n] > wanted and tokens[n] <= room:
            costlier = n
    if costlier is not None and most and costs[costlier] - wanted < wanted - amount:
        return [costlier], costs[costlier]
    return chosen, amount
