"""Plans between random meshes and engines: least bytes, each written once, senders balanced. Not covered: a table that
is wrong about both sides (the tests of families hold it against others' code)."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.plan.load_balance import balance_senders, water_fill
from megarlhf.weights.plan.traffic import least_receive
from tests.weights.cases import copy_in_memory, empty
from tests.weights.transfers import FAMILIES, Masks, Transfer, draw_transfer, filled, logical_of


def assert_balanced(case: Transfer, plan) -> None:
    """Each rank sends what the average of its replicas sends, within 10% or one row."""
    for ranks in case.replicas():
        sent = [plan.elements_sent(rank) for rank in ranks]
        mean = sum(sent) / len(sent)
        assert max(abs(n - mean) for n in sent) <= max(0.1 * mean, case.largest_row())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_random_layouts(family):
    draw = random.Random(family)
    received = 0
    for _ in range(4):
        case = draw_transfer(draw, family=family)
        received += _check(case)
    assert received > 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_any_mesh_to_any_engine(draw):
    _check(draw_transfer(draw))


def _check(case: Transfer) -> int:
    """Everything there is to say of a plan; returns the elements received."""
    logical = logical_of(case)
    plan = make_plan(case.sources, case.destinations)
    live = empty(case.destinations)
    copy_in_memory(plan, case.live_sources(logical), live)
    expected = filled(case.destinations, logical)
    for rank, storages in expected.items():
        assert all(torch.equal(live[rank][name], value) for name, value in storages.items())
    writes = dict.fromkeys(expected, 0)
    pairs = dict.fromkeys(plan.traffic, 0)
    for copy in plan.copies:
        writes[copy.dst_rank] += copy.numel
        pairs[copy.src_rank, copy.dst_rank] += copy.numel
    assert writes == {part.rank: sum(p.box.numel for p in part.placements) for part in case.destinations}
    assert pairs == plan.traffic

    least = least_receive(case.sources, case.destinations)
    for source, destination in zip(case.sources, case.destinations, strict=True):
        lacking = Masks(case.arch, [source]).lacking(Masks(case.arch, [destination]))
        assert plan.elements_received(source.rank) == least[source.rank] == lacking
    assert_balanced(case, plan)
    return sum(least.values())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_one_ranks_copies_are_those_of_the_whole_plan(draw):
    case = draw_transfer(draw)
    plan = make_plan(case.sources, case.destinations)
    for rank in range(case.mesh.world_size):
        own = make_plan(case.sources, case.destinations, only_rank=rank)
        assert own.traffic == plan.traffic
        assert own.copies == tuple(c for c in plan.copies if rank in (c.src_rank, c.dst_rank))


def test_a_destination_has_few_peers():
    """Two replicas of two stages: a rank takes the other stage's matrices from one of them, its vectors from one."""
    draw = random.Random(0)
    while (case := draw_transfer(draw, family="llama")).mesh != case.mesh.__class__(tp=2, pp=2, dp=4):
        pass
    plan = make_plan(case.sources, case.destinations)
    assert max(len(plan.receives(rank)) for rank in range(16)) <= 8


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 200))
def test_filling_levels_the_loads(loads, total):
    """All is dealt out, nothing is taken away, and nobody who got something ends more than 1 above another."""
    parts = water_fill(loads, total)
    assert sum(parts) == total
    assert min(parts) >= 0
    after = [load + part for load, part in zip(loads, parts, strict=True)]
    assert all(end <= min(after) + 1 for end, part in zip(after, parts, strict=True) if part)


def test_who_carries_more_already_gets_less():
    """Rank 0 alone has 10; of 20 that 0 and 1 share it takes 5, so that both send 15; rank 3 meets rank 1 only."""
    shares = balance_senders({(0, 1): {2: 10, 3: 10}, (0,): {3: 10}}, lambda ranks, key, position: position)
    assert shares == {((0,), 3): [(0, 10)], ((0, 1), 2): [(0, 5), (1, 10)], ((0, 1), 3): [(1, 10)]}
