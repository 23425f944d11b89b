"""Packing sequences that begin alike into micro-batches, with one copy of the beginning for all that meet in one.

Pure integers, as `packing/partition.py`, of which it uses the machinery. Its items are *parts*: sequences of a group
that are computed together. It begins with whole groups, and divides one only where that pays for the copy of the
beginning:

1. Whole groups, those that exceed the budget in the fewest parts that fit. Where they would take more micro-batches
   than without sharing, what finds no room is divided to fill the micro-batches that there are.
2. Balanced over ranks by moves and swaps, as plain sequences are.
3. The costliest rank hands continuations to cheaper ones, until none lowers its cost: to where sequences of their group
   already are, for nothing, or else with a copy of the beginning.
4. Where ranks still differ, the same from finer parts: a better beginning where groups are fewer than ranks.

What counts (`LevelledPacking.worse`) is the cost of the costliest rank, for which all wait once in a mini-batch, when
gradients are summed; then what all ranks compute; then micro-batches. Sharing nothing is among what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megarlhf.parallel.packing.bins import (
    BinCapacities,
    Bins,
    balance,
    first_fit_decreasing,
    longest_processing_time_first,
    shift_of,
    to_integer,
    to_integers,
)
from megarlhf.parallel.packing.partition import ForwardCost, require_fits
from megarlhf.parallel.packing.tree_levelling import TOLERANCE, LevelledPacking, Levelling, Packed, Tree, TreePart

FINENESS = (1, 2, 4)
"""Finer parts cost a rank's share of the work over one of these, or little more."""
MAX_FINE = 5_000
"""Sequences up to which finer parts are tried at all; so many are even without."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences that begin with the same tokens."""

    shared: int
    """Tokens of the common beginning; 0: nothing is shared."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, the shared ones included; what has nothing behind them has as many."""
    divisible: bool = True
    """May be computed in several parts, each with its own copy of the beginning. A pair of `rm` or `dpo` may not."""

    @property
    def continuations(self) -> tuple[int, ...]:
        """Tokens of each sequence behind the shared ones."""
        return tuple(length - self.shared for length in self.lengths)


def pack_trees(groups: Sequence[PrefixGroup], *, num_ranks: int, max_tokens: int, cost: ForwardCost) -> Packed:
    """[rank][micro-batch]: (index into `groups`, which of its sequences), each sequence once.

    Sequences of a group that are in the same micro-batch are one entry. It takes `shared` tokens and what each has
    behind them; the entries of a micro-batch take `max_tokens` at most. Order and numbers of micro-batches as `pack`,
    of which this is the same result where nothing is shared. Compared with `pack` of the sequences (of indivisible
    groups: the groups) it never computes more, nor more micro-batches, and no rank costs more than its costliest.

    Raises: ValueError when a sequence, or a group that may not be divided, is longer than `max_tokens`, on an empty
    group, a sequence shorter than what it shares or of no token, and on `num_ranks` or `max_tokens` below 1.
    """
    _check(groups, num_ranks, max_tokens)
    problem = _Problem(tuple(groups), num_ranks, max_tokens, cost)
    require_fits([tokens for tokens, _ in problem.unshared], max_tokens)
    return _best(problem).packed


def _check(groups: Sequence[PrefixGroup], num_ranks: int, max_tokens: int) -> None:
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} = {value}, expected 1 or more; give a positive number")
    for index, group in enumerate(groups):
        if not group.lengths:
            raise ValueError(f"group {index} holds no sequence, expected one or more; leave the group out")
        if min(group.lengths) < max(1, group.shared) or group.shared < 0:
            raise ValueError(
                f"group {index} shares {group.shared} tokens and holds a sequence of {min(group.lengths)}, expected "
                "0 or more shared and sequences at least as long, of 1 token or more; leave the sequence out"
            )


@dataclass(frozen=True)
class _Problem:
    groups: tuple[PrefixGroup, ...]
    num_ranks: int
    max_tokens: int
    cost: ForwardCost

    @cached_property
    def unshared(self) -> list[tuple[int, float]]:
        """Tokens and cost of the groups that `pack` would have: single sequences, and what may not be divided; of what
        only fits with one copy of the beginning, with one."""
        found: list[tuple[int, float]] = []
        for group in self.groups:
            if group.divisible:
                found += [(length, self.cost.of(length)) for length in group.lengths]
            elif sum(group.lengths) <= self.max_tokens:
                found.append((sum(group.lengths), sum(map(self.cost.of, group.lengths))))
            else:
                found.append(self._shared(group))
        return found

    def _shared(self, group: PrefixGroup) -> tuple[int, float]:
        if not group.shared:
            return sum(group.lengths), sum(map(self.cost.of, group.lengths))
        return group.shared + sum(group.continuations), self.cost.of_tree(group.shared, group.continuations)

    @cached_property
    def trees(self) -> list[Tree]:
        """Of all groups, in order; their continuations are in the order of `unshared`."""
        shift = shift_of(max((self._whole_cost(group) for group in self.groups), default=1.0))
        return [tree for index, group in enumerate(self.groups) for tree in self._trees_of(index, group, shift)]

    def _whole_cost(self, group: PrefixGroup) -> float:
        apart = group.divisible and not group.shared
        return max(map(self.cost.of, group.lengths)) if apart else self._shared(group)[1]

    def _trees_of(self, index: int, group: PrefixGroup, shift: int) -> list[Tree]:
        def whole(cost: float) -> int:
            return to_integer(cost, shift)

        of, numbers = self.cost.of, range(len(group.lengths))
        if not group.divisible:
            tokens, cost = self._shared(group)
            apart = whole(sum(map(of, group.lengths)))
            return [Tree(index, (tuple(numbers),), 0, 0, (tokens,), (whole(cost),), (apart,))]
        if group.shared == 0 or len(numbers) == 1:
            prices = [whole(of(length)) for length in group.lengths]
            return [Tree(index, ((n,),), 0, 0, (group.lengths[n],), (prices[n],), (prices[n],)) for n in numbers]
        empty = self.cost.of_tree(group.shared, [])
        behind = [whole(self.cost.of_tree(group.shared, [tokens]) - empty) for tokens in group.continuations]
        return [
            Tree(
                group=index,
                members=tuple((n,) for n in numbers),
                tokens=group.shared,
                price=whole(empty),
                continuation_tokens=group.continuations,
                continuation_prices=tuple(behind),
                unshared_prices=tuple(whole(empty) + price for price in behind),
            )
        ]

    @cached_property
    def num_bins(self) -> int:
        """Micro-batches of all ranks without sharing."""
        fewest = len(first_fit_decreasing([tokens for tokens, _ in self.unshared], self.max_tokens))
        return -(-fewest // self.num_ranks) * self.num_ranks

    @cached_property
    def shares_nothing(self) -> bool:
        return all(len(tree.members) == 1 for tree in self.trees) and [
            tree.continuation_tokens[0] for tree in self.trees
        ] == [tokens for tokens, _ in self.unshared]

    @cached_property
    def share(self) -> int:
        """Of the cost of whole groups, a rank's."""
        return -(-sum(tree.price_of(tree.all) for tree in self.trees) // self.num_ranks)

    @cached_property
    def least(self) -> int:
        """No packing has a costliest rank below this."""
        longest = (tree.price + max(tree.continuation_prices) for tree in self.trees)
        return max([self.share, *longest])

    def even_enough(self, outcome: LevelledPacking) -> bool:
        return (outcome.costliest_rank - self.least) * TOLERANCE <= self.least


def _best(problem: _Problem) -> LevelledPacking:
    """The best of what comes of whole groups, of finer parts, and of plain sequences."""
    tried: list[list[TreePart]] = [_parts(problem, None)]
    outcomes = _outcomes(problem, tried[0])
    if problem.shares_nothing:
        return outcomes[0]
    if sum(len(tree.members) for tree in problem.trees) <= MAX_FINE:
        for target in [-(-problem.share // fineness) for fineness in FINENESS]:
            if any(map(problem.even_enough, outcomes)):
                break
            parts = _parts(problem, target)
            if all(len(parts) != len(other) for other in tried):
                tried.append(parts)
                outcomes += _outcomes(problem, parts)
    # Without sharing the costliest rank has a rank's share of the work at least.
    unshared_total = sum(price for tree in problem.trees for price in tree.unshared_prices)
    fair = [outcome for outcome in outcomes if outcome.costliest_rank * problem.num_ranks <= unshared_total]
    if not fair:
        bound, plain = _plain(problem)
        fair = [outcome for outcome in outcomes if outcome.costliest_rank <= bound] + [plain]
    return min(fair, key=lambda outcome: outcome.worse(problem.share))


def _parts(problem: _Problem, target: int | None) -> list[TreePart]:
    """Each tree in the fewest parts that fit, or in so many that each costs `target` or little more."""
    parts = []
    for number, tree in enumerate(problem.trees):
        room = problem.max_tokens - tree.tokens
        sizes, prices = list(tree.continuation_tokens), list(tree.continuation_prices)
        found = [tree.all] if sum(sizes) <= room else first_fit_decreasing(sizes, room)
        if target is not None:
            count = min(len(sizes), -(-tree.price_of(tree.all) // max(target, 1)))
            if count > len(found):
                found = longest_processing_time_first(sizes, prices, room, count) or found
        parts += [TreePart(number, tuple(continuations)) for continuations in found if continuations]
    return parts


def _outcomes(problem: _Problem, parts: list[TreePart]) -> list[LevelledPacking]:
    """What becomes of these parts: none where they cannot be packed into the micro-batches that there may be, and the
    first is of these parts as they are."""
    found = _within(problem, parts)
    if found is None:
        return []
    parts, fewest = found
    sizes = [problem.trees[part.tree].tokens_of(part.continuations) for part in parts]
    prices = [problem.trees[part.tree].price_of(part.continuations) for part in parts]
    bins, ranks = balance(sizes, prices, problem.max_tokens, fewest, problem.num_ranks)
    levelling = Levelling(problem.trees, parts, bins, ranks)
    levelling.improve()
    return levelling.outcomes


def _within(problem: _Problem, parts: list[TreePart]) -> tuple[list[TreePart], list[list[int]]] | None:
    """The parts in as many micro-batches as there are without sharing, or fewer. Where they do not go in, those that
    find no room are divided: as much as fits into where most room is. None where even so they do not."""
    trees = problem.trees
    sizes = [trees[part.tree].tokens_of(part.continuations) for part in parts]
    fewest = first_fit_decreasing(sizes, problem.max_tokens)
    if len(fewest) <= problem.num_bins:
        return parts, fewest
    room = BinCapacities(problem.num_bins, problem.max_tokens)
    placed: list[TreePart] = []
    bins: list[list[int]] = [[] for _ in range(problem.num_bins)]
    for n in sorted(range(len(parts)), key=lambda n: (-sizes[n], n)):
        tree, left = trees[parts[n].tree], list(parts[n].continuations)
        while left:
            number = room.first(tree.tokens_of(left))
            taken = left
            if number is None:
                number = room.first(room.most)
                assert number is not None
                taken = _that_fit(tree, left, room.most)
                if not taken:
                    return None
            room.take(number, tree.tokens_of(taken))
            bins[number].append(len(placed))
            placed.append(TreePart(parts[n].tree, tuple(taken)))
            left = [each for each in left if each not in taken]
    return placed, [numbers for numbers in bins if numbers]


def _that_fit(tree: Tree, continuations: Sequence[int], room: int) -> list[int]:
    """The longest, as long as there is room for another one."""
    taken: list[int] = []
    size = tree.tokens
    for n in sorted(continuations, key=lambda n: (-tree.continuation_tokens[n], n)):
        if size + tree.continuation_tokens[n] <= room:
            taken.append(n)
            size += tree.continuation_tokens[n]
    return taken


def _plain(problem: _Problem) -> tuple[int, LevelledPacking]:
    """As without sharing, and then with one copy of what is shared in a micro-batch. First the costliest rank without:
    no rank costs more then."""
    sizes = [tokens for tokens, _ in problem.unshared]
    prices = to_integers([price for _, price in problem.unshared])
    fewest = first_fit_decreasing(sizes, problem.max_tokens)
    bins, ranks = balance(sizes, prices, problem.max_tokens, fewest, problem.num_ranks)
    trees = problem.trees
    apart = [price for tree in trees for price in tree.unshared_prices]
    costliest = max(sum(apart[n] for number in rank for n in bins.members[number]) for rank in ranks)
    parts = [TreePart(n, (each,)) for n, tree in enumerate(trees) for each in tree.all]
    sizes = [trees[part.tree].tokens_of(part.continuations) for part in parts]
    prices = [trees[part.tree].price_of(part.continuations) for part in parts]
    levelling = Levelling(trees, parts, Bins(sizes, prices, problem.max_tokens, bins.members), ranks)
    levelling.join()
    return costliest, levelling.outcome()
