"""Packing of sequences with common prefixes into micro-batches: one copy of a prefix for all its sequences that meet.

Pure integers, by the functions of `packing/partition.py`. Items are *parts*: sequences of a group that are computed
together. A group is divided only where that pays for another copy of its prefix:

1. Start from whole groups. A group that exceeds the budget is divided into the fewest parts that fit. If this needs
   more micro-batches than packing without sharing, parts that find no room are divided to fill the existing
   micro-batches.
2. Balance over ranks by moves and swaps, as for plain sequences.
3. The costliest rank hands continuations to cheaper ones until its cost falls no more: for free where sequences of
   their group already are, elsewhere with a copy of the prefix.
4. If ranks still differ, repeat with finer parts. It is a better start where there are fewer groups than ranks.

The best packing (`LevelledPacking.key`) has the least cost of the costliest rank, since all ranks wait for it once per
mini-batch, when gradients are summed; then the least total cost; then the fewest micro-batches. Packings without
sharing are compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megarlhf.parallel.packing.bins import (
    BinCapacities,
    Bins,
    first_fit_decreasing,
    longest_processing_time_first,
    pack_balanced,
    shift_of,
    to_integer,
    to_integers,
)
from megarlhf.parallel.packing.partition import ForwardCost, require_fits, require_positive
from megarlhf.parallel.packing.tree_levelling import TOLERANCE, LevelledPacking, Levelling, Packed, Tree, TreePart

FINENESS = (1, 2, 4)
"""Finer parts cost about a rank's share of the work over one of these."""
MAX_FINE = 5_000
"""Number of sequences up to which finer parts are tried. More sequences are even without them."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences with a common prefix."""

    shared: int
    """Tokens of the prefix; 0: nothing is shared."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, including the prefix. A sequence may be just the prefix."""
    divisible: bool = True
    """May be computed in several parts, each with its own copy of the prefix. A pair of `rm` or `dpo` may not."""

    @property
    def continuations(self) -> tuple[int, ...]:
        """Tokens of each sequence behind the prefix."""
        return tuple(length - self.shared for length in self.lengths)


def pack_trees(groups: Sequence[PrefixGroup], *, num_ranks: int, max_tokens: int, cost: ForwardCost) -> Packed:
    """Pack groups of sequences with common prefixes into micro-batches.

    Sequences of a group in the same micro-batch are one entry, which takes the prefix's tokens once. The entries of a
    micro-batch take at most `max_tokens`. Number and order of micro-batches are as in `pack`, and the result is equal
    where nothing is shared. Compared with `pack` of the sequences (of the groups, where they are indivisible), it never
    computes more, has no more micro-batches, and no rank costs more than the costliest rank there.

    Returns: [rank][micro-batch]: (index into `groups`, its sequences in this entry), each sequence once
    Raises: ValueError when a sequence, or an indivisible group, is longer than `max_tokens`; on an empty group; on a
        sequence without tokens or shorter than the prefix; on `num_ranks` or `max_tokens` below 1
    Example: 1 rank, 10 tokens, groups (prefix 4, lengths (6, 5)) and (prefix 0, lengths (3,)): the first takes
        4 + 2 + 1 = 7 tokens, so all fit into one micro-batch: [[[(0, (0, 1)), (1, (0,))]]]
    """
    require_positive(num_ranks=num_ranks, max_tokens=max_tokens)
    _check(groups)
    problem = _Problem(tuple(groups), num_ranks, max_tokens, cost)
    require_fits([tokens for tokens, _ in problem.unshared], max_tokens)
    return _best(problem).packed


def _check(groups: Sequence[PrefixGroup]) -> None:
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
        """Tokens and cost of the groups for `pack`: single sequences and indivisible groups. An indivisible group that
        fits only with one copy of its prefix is counted with one."""
        tokens_and_costs: list[tuple[int, float]] = []
        for group in self.groups:
            if group.divisible:
                tokens_and_costs += [(length, self.cost.of(length)) for length in group.lengths]
            elif sum(group.lengths) <= self.max_tokens:
                tokens_and_costs.append((sum(group.lengths), sum(map(self.cost.of, group.lengths))))
            else:
                tokens_and_costs.append(self._shared(group))
        return tokens_and_costs

    def _shared(self, group: PrefixGroup) -> tuple[int, float]:
        """Tokens and cost of a whole group with one copy of its prefix."""
        if not group.shared:
            return sum(group.lengths), sum(map(self.cost.of, group.lengths))
        return group.shared + sum(group.continuations), self.cost.of_tree(group.shared, group.continuations)

    @cached_property
    def trees(self) -> list[Tree]:
        """Trees of all groups, in order. Their continuations are in the order of `unshared`."""
        greatest = max((self._greatest_cost(group) for group in self.groups), default=1.0)
        return [tree for n, group in enumerate(self.groups) for tree in self._trees_of(n, group, shift_of(greatest))]

    def _greatest_cost(self, group: PrefixGroup) -> float:
        is_plain = group.divisible and not group.shared
        return max(map(self.cost.of, group.lengths)) if is_plain else self._shared(group)[1]

    def _trees_of(self, index: int, group: PrefixGroup, shift: int) -> list[Tree]:
        def integer(cost: float) -> int:
            return to_integer(cost, shift)

        members = range(len(group.lengths))
        if not group.divisible:
            tokens, cost = self._shared(group)
            unshared = integer(sum(map(self.cost.of, group.lengths)))
            return [Tree(index, (tuple(members),), 0, 0, (tokens,), (integer(cost),), (unshared,))]
        if group.shared == 0 or len(members) == 1:
            costs = [integer(self.cost.of(length)) for length in group.lengths]
            return [Tree(index, ((n,),), 0, 0, (group.lengths[n],), (costs[n],), (costs[n],)) for n in members]
        prefix = self.cost.of_tree(group.shared, [])
        continuations = [integer(self.cost.of_tree(group.shared, [n]) - prefix) for n in group.continuations]
        return [
            Tree(
                group=index,
                members=tuple((n,) for n in members),
                tokens=group.shared,
                cost=integer(prefix),
                continuation_tokens=group.continuations,
                continuation_costs=tuple(continuations),
                unshared_costs=tuple(integer(prefix) + cost for cost in continuations),
            )
        ]

    @cached_property
    def num_bins(self) -> int:
        """Number of micro-batches on all ranks without sharing."""
        fewest = len(first_fit_decreasing([tokens for tokens, _ in self.unshared], self.max_tokens))
        return -(-fewest // self.num_ranks) * self.num_ranks

    @cached_property
    def shares_nothing(self) -> bool:
        return all(len(tree.members) == 1 for tree in self.trees) and [
            tree.continuation_tokens[0] for tree in self.trees
        ] == [tokens for tokens, _ in self.unshared]

    @cached_property
    def share(self) -> int:
        """Mean cost of a rank when all groups stay whole."""
        return -(-sum(tree.total_cost for tree in self.trees) // self.num_ranks)

    @cached_property
    def lower_bound(self) -> int:
        """Lower bound on the cost of the costliest rank."""
        return max([self.share, *(tree.cost + max(tree.continuation_costs) for tree in self.trees)])

    def tokens_and_costs(self, parts: Sequence[TreePart]) -> tuple[list[int], list[int]]:
        """Tokens and costs of parts, as items of `bins.py`."""
        with_tree = [(self.trees[part.tree], part.continuations) for part in parts]
        tokens = [tree.tokens_of(continuations) for tree, continuations in with_tree]
        return tokens, [tree.cost_of(continuations) for tree, continuations in with_tree]


def _best(problem: _Problem) -> LevelledPacking:
    """The best packing from whole groups, finer parts and plain sequences."""
    tried = [_parts(problem, None)]
    outcomes = _outcomes(problem, tried[0])
    if problem.shares_nothing:
        return outcomes[0]
    bound = problem.lower_bound
    if sum(len(tree.members) for tree in problem.trees) <= MAX_FINE:
        for target in [-(-problem.share // fineness) for fineness in FINENESS]:
            if any((outcome.costliest_rank - bound) * TOLERANCE <= bound for outcome in outcomes):
                break
            parts = _parts(problem, target)
            if all(len(parts) != len(other) for other in tried):
                tried.append(parts)
                outcomes += _outcomes(problem, parts)
    # Without sharing, the costliest rank costs at least the mean.
    unshared_total = sum(cost for tree in problem.trees for cost in tree.unshared_costs)
    admitted = [outcome for outcome in outcomes if outcome.costliest_rank * problem.num_ranks <= unshared_total]
    if not admitted:
        costliest, unshared = _unshared(problem)
        admitted = [outcome for outcome in outcomes if outcome.costliest_rank <= costliest] + [unshared]
    return min(admitted, key=lambda outcome: outcome.key(problem.share))


def _parts(problem: _Problem, target: int | None) -> list[TreePart]:
    """Divide each tree into the fewest parts that fit, or into parts that cost `target` or little more."""
    parts = []
    for n, tree in enumerate(problem.trees):
        room = problem.max_tokens - tree.tokens
        tokens, costs = list(tree.continuation_tokens), list(tree.continuation_costs)
        divided = [list(tree.all)] if sum(tokens) <= room else first_fit_decreasing(tokens, room)
        if target is not None:
            count = min(len(tokens), -(-tree.total_cost // max(target, 1)))
            if count > len(divided):
                divided = longest_processing_time_first(tokens, costs, room, count) or divided
        parts += [TreePart(n, tuple(continuations)) for continuations in divided if continuations]
    return parts


def _outcomes(problem: _Problem, parts: list[TreePart]) -> list[LevelledPacking]:
    """Packings that start from these parts, the first with the parts as they are. Empty where the parts do not fit into
    the available micro-batches."""
    packed = _pack_or_divide(problem, parts)
    if packed is None:
        return []
    parts, fewest = packed
    bins, ranks = pack_balanced(*problem.tokens_and_costs(parts), problem.max_tokens, problem.num_ranks, fewest)
    levelling = Levelling(problem.trees, parts, bins, ranks)
    levelling.improve()
    return levelling.outcomes


def _pack_or_divide(problem: _Problem, parts: list[TreePart]) -> tuple[list[TreePart], list[list[int]]] | None:
    """Pack the parts into as many micro-batches as there are without sharing, or fewer. If they do not fit, parts that
    find no room are divided: as much as fits goes into the emptiest micro-batch. None where even this fails."""
    trees = problem.trees
    tokens, _ = problem.tokens_and_costs(parts)
    fewest = first_fit_decreasing(tokens, problem.max_tokens)
    if len(fewest) <= problem.num_bins:
        return parts, fewest
    free = BinCapacities(problem.num_bins, problem.max_tokens)
    divided: list[TreePart] = []
    bins: list[list[int]] = [[] for _ in range(problem.num_bins)]
    for n in sorted(range(len(parts)), key=lambda n: (-tokens[n], n)):
        tree, left = trees[parts[n].tree], list(parts[n].continuations)
        while left:
            bin_index = free.first(tree.tokens_of(left))
            taken = left
            if bin_index is None:
                bin_index = free.first(free.most)
                assert bin_index is not None
                taken = _that_fit(tree, left, free.most)
                if not taken:
                    return None
            free.take(bin_index, tree.tokens_of(taken))
            bins[bin_index].append(len(divided))
            divided.append(TreePart(parts[n].tree, tuple(taken)))
            left = [continuation for continuation in left if continuation not in taken]
    return divided, [items for items in bins if items]


def _that_fit(tree: Tree, continuations: Sequence[int], room: int) -> list[int]:
    """The longest continuations that fit into `room` together with the prefix."""
    taken: list[int] = []
    tokens = tree.tokens
    for n in sorted(continuations, key=lambda n: (-tree.continuation_tokens[n], n)):
        if tokens + tree.continuation_tokens[n] <= room:
            taken.append(n)
            tokens += tree.continuation_tokens[n]
    return taken


def _unshared(problem: _Problem) -> tuple[int, LevelledPacking]:
    """The packing without sharing, then joined where sequences of a group meet. Returns the cost of the costliest rank
    before joining, and the packing: no rank costs more after it."""
    tokens = [tokens for tokens, _ in problem.unshared]
    costs = to_integers([cost for _, cost in problem.unshared])
    bins, ranks = pack_balanced(tokens, costs, problem.max_tokens, problem.num_ranks)
    unshared = [cost for tree in problem.trees for cost in tree.unshared_costs]
    costliest = max(sum(unshared[item] for n in rank for item in bins.members[n]) for rank in ranks)
    parts = [TreePart(n, (continuation,)) for n, tree in enumerate(problem.trees) for continuation in tree.all]
    joined = Bins(*problem.tokens_and_costs(parts), problem.max_tokens, bins.members)
    levelling = Levelling(problem.trees, parts, joined, ranks)
    levelling.join()
    return costliest, levelling.outcome()
