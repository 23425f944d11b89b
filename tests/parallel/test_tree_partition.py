"""Packing sequences that begin alike: by hand, against brute force, and against packing without sharing.

Not covered: whether the cost model agrees with measured times, and how long packing takes.
"""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.parallel.packing.partition import ForwardCost, pack
from megarlhf.parallel.packing.tree_partition import PrefixGroup, pack_trees
from tests.parallel.test_partition import LINEAR, over_mean
from tests.refuses import refuses

COST = ForwardCost(per_token=1.0, per_pair=1 / 2000)


def alike(shared, *responses, divisible=True):
    """A group from the lengths of its responses."""
    return PrefixGroup(shared, tuple(shared + response for response in responses), divisible)


def lognormal(count, per_group, prompt, response, seed):
    draw = random.Random(seed)

    def one():
        return max(1, min(4 * response, round(draw.lognormvariate(math.log(response) - 0.32, 0.8))))

    return [alike(prompt, *(one() for _ in range(per_group))) for _ in range(count)]


def entry_tokens(group, members):
    return group.shared + sum(group.continuations[n] for n in members)


def entry_cost(group, members, cost):
    if not group.shared:
        return sum(cost.of(group.lengths[n]) for n in members)
    return cost.of_tree(group.shared, [group.continuations[n] for n in members])


def rank_costs(packed, groups, cost):
    return [sum(entry_cost(groups[n], members, cost) for batch in rank for n, members in batch) for rank in packed]


def unshared(groups):
    """What `pack` gets without sharing."""
    found = []
    for group in groups:
        found += [[each] for each in group.lengths] if group.divisible else [list(group.lengths)]
    return found


def copies(packed):
    return sum(len(batch) for rank in packed for batch in rank)


# ---- By hand


BY_HAND = {
    "one entry, the prefix counts once: 5 + 2 + 1 + 3 = 11; alone the three sequences take 7 + 6 + 8 = 21": (
        *([alike(5, 2, 1, 3)], 1, 11),
        [[[(0, (0, 1, 2))]]],
    ),
    "empty responses cost nothing: 3 + 2 tokens, and 3 for the prompt of the other": (
        *([alike(3, 0, 2, 0, 0), alike(3, 0, 0, 0)], 1, 8),
        [[[(0, (0, 1, 2, 3)), (1, (0, 1, 2))]]],
    ),
    "a prompt that fills the budget alone": ([alike(8, 0, 0)], 1, 8, [[[(0, (0, 1))]]]),
    "ranks have 22 and 20 tokens; what would move takes a copy of 10 along": (
        *([alike(10, 6, 6), alike(10, 5, 5)], 2, 99),
        [[[(0, (0, 1))]], [[(1, (0, 1))]]],
    ),
    "nothing": ([], 3, 9, [[], [], []]),
}


@pytest.mark.parametrize("groups, num_ranks, max_tokens, expected", BY_HAND.values(), ids=BY_HAND)
def test_by_hand(groups, num_ranks, max_tokens, expected):
    assert pack_trees(groups, num_ranks=num_ranks, max_tokens=max_tokens, cost=LINEAR) == expected


def test_a_group_over_the_budget_is_divided_into_the_fewest_parts_that_fit():
    """Behind 4 tokens 6 are left in a budget of 10: 4 + 2, 3 + 3 in two parts, of which each has its copy."""
    (rank,) = pack_trees([alike(4, 2, 3, 4, 3)], num_ranks=1, max_tokens=10, cost=LINEAR)
    assert sorted(rank) == [[(0, (0, 2))], [(0, (1, 3))]]


def test_two_ranks_share_one_group_and_each_computes_the_beginning():
    packed = pack_trees([alike(2, 4, 3, 3, 4)], num_ranks=2, max_tokens=99, cost=LINEAR)
    assert rank_costs(packed, [alike(2, 4, 3, 3, 4)], LINEAR) == [9.0, 9.0]


def test_three_groups_on_two_ranks_divide_one():
    """Three of 2 + 4 x 4 = 18 tokens: 18 + 2 + 8 for each rank, and not 36 and 18."""
    groups = [alike(2, 4, 4, 4, 4)] * 3
    packed = pack_trees(groups, num_ranks=2, max_tokens=99, cost=LINEAR)
    assert rank_costs(packed, groups, LINEAR) == [28.0, 28.0]
    assert copies(packed) == 4


def test_pairs_stay_together_and_share():
    """Of 8 ranks two have a pair; a budget of 9 holds 3 + 2 + 4 although both alone are 12."""
    pair = alike(3, 2, 4, divisible=False)
    packed = pack_trees([pair, pair], num_ranks=8, max_tokens=9, cost=LINEAR)
    assert sorted(packed)[-2:] == [[[(0, (0, 1))]], [[(1, (0, 1))]]]
    assert copies(packed) == 2


def test_a_group_stays_whole_while_that_takes_no_more_micro_batches_than_without_sharing():
    """Five groups of 2 + 4 x 2 = 10 tokens, one of which fits into 15. Without sharing, 20 sequences of 4, of which 3
    fit, take 7 micro-batches."""
    (rank,) = pack_trees([alike(2, 2, 2, 2, 2)] * 5, num_ranks=1, max_tokens=15, cost=LINEAR)
    assert sorted(rank) == [[(n, (0, 1, 2, 3))] for n in range(5)]


def test_a_group_is_divided_rather_than_that_micro_batches_stay_half_filled():
    """Four groups of 1 + 5 x 9 = 46 tokens, one of which fits into 70. Without sharing, 20 sequences of 10, of which 7
    fit, take 3 micro-batches. So three groups stay whole, and the fourth fills what is left: 24, 1 + 2 x 9 at most."""
    (rank,) = pack_trees([alike(1, *[9] * 5)] * 4, num_ranks=1, max_tokens=70, cost=LINEAR)
    assert sorted(len(members) for batch in rank for _, members in batch) == [1, 2, 2, 5, 5, 5]
    assert len(rank) == 3


def test_what_is_divided_is_divided_evenly():
    """Four groups of 1 + 8 x 4 = 33 tokens in a budget of 64, three micro-batches without sharing: the fourth fills up
    two of them, each as much, rather than one with 7 of its 8 sequences."""
    groups = [alike(1, *[4] * 8)] * 4
    (rank,) = pack_trees(groups, num_ranks=1, max_tokens=64, cost=LINEAR)
    tokens = [sum(entry_tokens(groups[n], members) for n, members in batch) for batch in rank]
    assert tokens == [50, 50, 33]


@pytest.mark.parametrize(
    "groups, num_ranks, max_tokens, names",
    [
        ([alike(3, 1), alike(4, 1, 5)], 2, 8, ("group 2", "9 tokens", "at most 8", "max_tokens_per_micro_batch to 9")),
        ([alike(3, 3, 3, divisible=False)], 2, 8, ("group 0", "9 tokens", "max_tokens_per_micro_batch to 9")),
        ([PrefixGroup(0, (4, 5), divisible=False)], 2, 8, ("group 0", "9 tokens", "at most 8")),
        ([alike(3), alike(3, 1)], 2, 8, ("group 0", "no sequence")),
        ([PrefixGroup(3, (4, 2))], 2, 8, ("group 0", "3 tokens", "a sequence of 2")),
        ([PrefixGroup(0, (4, 0))], 2, 8, ("group 0", "0 tokens", "a sequence of 0")),
        ([alike(3, 1)], 0, 8, ("num_ranks = 0", "1 or more")),
        ([], 1, 0, ("max_tokens = 0", "1 or more")),
    ],
)
def test_what_cannot_be_packed(groups, num_ranks, max_tokens, names):
    with refuses(*names):
        pack_trees(groups, num_ranks=num_ranks, max_tokens=max_tokens, cost=LINEAR)


# ---- What always holds


@st.composite
def problems(draw, most=8, window=True):
    max_tokens = draw(st.integers(4, 60))
    groups = []
    for _ in range(draw(st.integers(0, most))):
        shared = draw(st.integers(0, max_tokens))
        longest = max_tokens - shared
        responses = draw(st.lists(st.integers(0 if shared else 1, longest), min_size=1, max_size=7))
        divisible = draw(st.booleans())
        if divisible or shared + sum(responses) <= max_tokens:
            groups.append(alike(shared, *responses, divisible=divisible))
    reach = draw(st.none() | st.integers(1, 9)) if window else None
    cost = ForwardCost(draw(st.floats(0, 3)), draw(st.floats(0.01, 3)), reach)
    return groups, draw(st.integers(1, 6)), max_tokens, cost


@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_never_more_work_nor_micro_batches_nor_a_costlier_rank_than_without_sharing(problem):
    groups, num_ranks, max_tokens, cost = problem
    packed = pack_trees(groups, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    assert packed == pack_trees(groups, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    batches = [batch for rank in packed for batch in rank]
    placed = sorted((n, member) for batch in batches for n, members in batch for member in members)
    assert placed == [(n, member) for n, group in enumerate(groups) for member in range(len(group.lengths))]
    assert all(len({n for n, _ in batch}) == len(batch) for batch in batches), "entries of one group in a micro-batch"
    assert all(sum(entry_tokens(groups[n], members) for n, members in batch) <= max_tokens for batch in batches)
    assert all(list(members) == sorted(members) for batch in batches for _, members in batch)
    together = {n: len(group.lengths) for n, group in enumerate(groups) if not group.divisible}
    assert all(len(members) == together.get(n, len(members)) for batch in batches for n, members in batch)
    for rank in packed:
        costs = rank_costs([[batch] for batch in rank], groups, cost)
        assert all(first > second * (1 - 1e-9) - 1e-9 for first, second in itertools.pairwise(costs))
    assert len({len(rank) for rank in packed}) == 1
    if any(sum(lengths) > max_tokens for lengths in unshared(groups)):
        return  # a pair that fits with one copy of its prompt only
    plain = pack(unshared(groups), num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
    costs = [sum(cost.of(each) for batch in rank for n in batch for each in unshared(groups)[n]) for rank in plain]
    assert len(packed[0]) <= len(plain[0])
    assert sum(rank_costs(packed, groups, cost)) <= sum(costs) * (1 + 1e-9)
    assert max(rank_costs(packed, groups, cost)) <= max(costs) * (1 + 1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(most=25))
def test_the_same_as_pack_where_nothing_is_shared(problem):
    """One sequence to a prompt, and pairs without one: bit for bit the micro-batches that there always were."""
    groups, num_ranks, max_tokens, cost = problem
    options = {"num_ranks": num_ranks, "max_tokens": max_tokens, "cost": cost}
    alone = [PrefixGroup(group.shared, group.lengths[:1]) for group in groups]
    packed = pack([list(group.lengths) for group in alone], **options)
    assert pack_trees(alone, **options) == [[[(n, (0,)) for n in batch] for batch in rank] for rank in packed]
    pairs = [group.lengths[:2] for group in groups if sum(group.lengths[:2]) <= max_tokens]
    packed = pack(pairs, **options)
    expected = [[[(n, tuple(range(len(pairs[n])))) for n in batch] for batch in rank] for rank in packed]
    assert pack_trees([PrefixGroup(0, pair, divisible=False) for pair in pairs], **options) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_one_rank_with_room_computes_every_beginning_once(problem):
    groups, _, _, cost = problem
    (batches,) = pack_trees(groups, num_ranks=1, max_tokens=10_000, cost=cost)
    assert len(batches) == bool(groups)
    assert sorted(entry for batch in batches for entry in batch) == [
        (n, tuple(range(len(group.lengths)))) for n, group in enumerate(groups)
    ]


# ---- Balance


def every_way(responses, num_ranks):
    return itertools.product(range(num_ranks), repeat=responses)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 30), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    st.integers(2, 3),
)
def test_close_to_the_best_costliest_rank_there_can_be(drawn, num_ranks):
    """By brute force over every way to deal up to 8 responses. Not always the best: at most 4/3 of it, as of longest
    processing time first."""
    groups = [alike(shared, *responses) for shared, responses in drawn]
    sequences = [(n, member) for n, group in enumerate(groups) for member in range(len(group.lengths))][:8]
    groups = [alike(g.shared, *g.continuations[: sum(n == i for n, _ in sequences)]) for i, g in enumerate(groups)]
    groups = [group for group in groups if group.lengths]

    def peak(ranks):
        costs = [0] * num_ranks
        for rank in range(num_ranks):
            mine = [sequence for sequence, of in zip(sequences, ranks, strict=True) if of == rank]
            costs[rank] = sum(groups[n].continuations[member] for n, member in mine)
            costs[rank] += sum(groups[n].shared for n in {n for n, _ in mine})
        return max(costs)

    best = min(map(peak, every_way(len(sequences), num_ranks)))
    packed = pack_trees(groups, num_ranks=num_ranks, max_tokens=1_000, cost=LINEAR)
    assert max(rank_costs(packed, groups, LINEAR)) <= best * 4 / 3


@pytest.mark.parametrize(
    "groups, num_ranks, most_copies",
    [
        pytest.param(lognormal(1, 16, 100, 100, 1), 4, 4, id="one group"),
        pytest.param(lognormal(3, 8, 100, 100, 1), 2, 5, id="three groups on two ranks"),
        pytest.param(lognormal(1, 64, 100, 60, 1) + lognormal(10, 4, 50, 50, 2), 4, 15, id="one dominates"),
        pytest.param(lognormal(16, 8, 256, 256, 1), 6, 18, id="no multiple of the ranks"),
        pytest.param(lognormal(512, 8, 200, 200, 1), 8, 512, id="many groups"),
    ],
)
def test_ranks_cost_alike(groups, num_ranks, most_copies):
    """Within 2% of the mean, with few copies of the beginnings: at most so many."""
    packed = pack_trees(groups, num_ranks=num_ranks, max_tokens=8192, cost=COST)
    assert over_mean(rank_costs(packed, groups, COST)) < 1.02
    assert copies(packed) <= most_copies


def test_one_long_response_among_short_ones():
    """Nine groups of seven responses of 10 and one of 3,000 tokens: no rank of four has more than three long ones."""
    groups = [alike(100, *[10] * 7, 3000)] * 9
    packed = pack_trees(groups, num_ranks=4, max_tokens=4096, cost=COST)
    long = [sum(7 in members for batch in rank for _, members in batch) for rank in packed]
    assert sorted(long) == [2, 2, 2, 3]
    assert max(rank_costs(packed, groups, COST)) == 3 * COST.of(3100)


def test_many_groups():
    groups = lognormal(3_000, 8, 200, 200, 0)
    packed = pack_trees(groups, num_ranks=64, max_tokens=8192, cost=COST)
    assert over_mean(rank_costs(packed, groups, COST)) < 1.001
    assert copies(packed) == 3_000


# ---- Cost


def pairs_by_brute_force(shared, continuations, window):
    """One by one: each token looks at itself and at what stands before it in its own sequence."""
    found = sum(min(position + 1, window or 10**9) for position in range(shared))
    for length in continuations:
        found += sum(min(position + 1, window or 10**9) for position in range(shared, shared + length))
    return found


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=5), st.none() | st.integers(1, 70))
def test_cost_of_a_tree(shared, continuations, window):
    cost = ForwardCost(per_token=7.0, per_pair=3.0, window=window)
    expected = 7 * (shared + sum(continuations)) + 3 * pairs_by_brute_force(shared, continuations, window)
    assert cost.of_tree(shared, continuations) == expected
    for length in continuations:
        assert cost.of_tree(shared, [length]) == cost.of(shared + length)


def test_cost_of_a_tree_by_hand():
    """Inside the prompt of 3: 1 + 2 + 3 = 6 pairs; a continuation of 2 looks at 2 x 3 of the prompt and 1 + 2 of its
    own, one of 1 at 3 + 1. With a window of 2: 1 + 2 + 2, then 2 each."""
    assert ForwardCost(0.0, 1.0).of_tree(3, [2, 1]) == 6 + (6 + 3) + (3 + 1)
    assert ForwardCost(0.0, 1.0, window=2).of_tree(3, [2, 1]) == 5 + 4 + 2
    assert ForwardCost(10.0, 0.0).of_tree(3, [2, 1]) == 60
