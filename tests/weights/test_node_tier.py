"""Plans in two tiers, executed in memory: what enters a node is the least, and everything arrives. Not covered: the
tiers over a network of several nodes."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.architectures.placements import identity_placements
from megarlhf.placement import Box, RankPlacements
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.plan.tiers import least_received_by_node, make_tiers, traffic_between_nodes
from megarlhf.weights.plan.traffic import Links, received_by_node, wire_seconds
from tests.weights.cases import copy_in_memory, empty, place_slice
from tests.weights.transfers import FAMILIES, Masks, Transfer, draw_transfer, filled, logical_of


def check(case: Transfer, node_of) -> int:
    logical = logical_of(case)
    tiers = make_tiers(case.sources, case.destinations, node_of)
    live = empty(case.destinations)
    copy_in_memory(tiers.arrive, case.live_sources(logical), live)
    copy_in_memory(tiers.fan_out, live, live)
    for rank, storages in filled(case.destinations, logical).items():
        assert all(torch.equal(live[rank][name], value) for name, value in storages.items())
    written = sum(copy.numel for plan in (tiers.arrive, tiers.fan_out) for copy in plan.copies)
    assert written == sum(placement.box.numel for part in case.destinations for placement in part.placements)

    assert traffic_between_nodes(tiers.fan_out, node_of) == {}
    came_in = received_by_node(traffic_between_nodes(tiers.arrive, node_of), max(node_of) + 1)
    least = least_received_by_node(case.sources, case.destinations, node_of)
    for node in set(node_of):
        holding = Masks(case.arch, [part for part in case.sources if node_of[part.rank] == node])
        wanting = Masks(case.arch, [part for part in case.destinations if node_of[part.rank] == node])
        assert came_in[node] == least[node] == holding.lacking(wanting)
    direct = traffic_between_nodes(make_plan(case.sources, case.destinations), node_of)
    whole = sum(received_by_node(direct, max(node_of) + 1))
    assert sum(came_in) <= whole
    return sum(came_in)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    draw = random.Random(family)
    crossed = 0
    for _ in range(4):
        case = draw_transfer(draw, family=family)
        crossed += check(case, case.node_of)
    assert crossed > 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_any_mesh_on_any_nodes(draw):
    """Nodes need not be contiguous ranks, nor equal."""
    case = draw_transfer(draw)
    nodes = draw.randint(1, 4)
    check(case, [draw.randrange(nodes) for _ in range(case.mesh.world_size)])


def test_the_receivers_of_a_node_share_alike():
    """Four ranks of node 1 want what node 0 has: 32 elements cross once, 8 to each, which each hands to three."""
    part = identity_placements({"w": (8, 4)}, 0)
    wanting = [part.on_rank(rank) for rank in (1, 2, 3, 4)]
    node_of = {0: 0, 1: 1, 2: 1, 3: 1, 4: 1}
    tiers = make_tiers([part], wanting, node_of)
    assert tiers.arrive.traffic == {(0, rank): 8 for rank in (1, 2, 3, 4)}
    assert tiers.fan_out.traffic == {(src, dst): 8 for src in range(1, 5) for dst in range(1, 5) if src != dst}
    assert traffic_between_nodes(tiers.arrive, node_of) == {(0, 1): 32}


def test_one_ranks_tiers_are_those_of_the_whole():
    case = draw_transfer(random.Random(5), family="qwen2_tied")
    tiers = make_tiers(case.sources, case.destinations, case.node_of)
    assert tiers.arrive.copies
    for rank in range(case.mesh.world_size):
        own = make_tiers(case.sources, case.destinations, case.node_of, only_rank=rank)
        for mine, whole in ((own.arrive, tiers.arrive), (own.fan_out, tiers.fan_out)):
            assert mine.traffic == whole.traffic
            assert mine.copies == tuple(c for c in whole.copies if rank in (c.src_rank, c.dst_rank))


def test_wire_time_is_that_of_the_busiest_link():
    """Rank 0 sends 4 x 32 elements of 2 bytes: 256 bytes = 2048 bits, all of them out of node 0. What crosses is
    charged to nodes alone, what stays inside to ranks alone: on nodes of ranks 0, 1, 2 and 3, 4, each gets half of it,
    1024 bits."""
    part = identity_placements({"w": (8, 4)}, 0)
    plan = make_plan([part], [part.on_rank(rank) for rank in (1, 2, 3, 4)])
    node_of = [0, 1, 1, 1, 1]
    assert wire_seconds(plan, node_of, Links(rank_gbps=1.0, node_gbps=4.0), 2) == pytest.approx(512e-9)
    assert wire_seconds(plan, node_of, Links(rank_gbps=1.0, node_gbps=0.5), 2) == pytest.approx(4096e-9)
    assert wire_seconds(plan, [0] * 5, Links(rank_gbps=2.0, node_gbps=0.5), 2) == pytest.approx(1024e-9)
    both = [0, 0, 0, 1, 1]
    assert wire_seconds(plan, both, Links(rank_gbps=1.0, node_gbps=4.0), 2) == pytest.approx(1024e-9), "inside"
    assert wire_seconds(plan, both, Links(rank_gbps=1.0, node_gbps=0.5), 2) == pytest.approx(2048e-9), "outside"


def test_wire_time_counts_the_two_directions_and_receivers_apart():
    """Two ranks swap 32 elements of 2 bytes, 512 bits each way; three send 512 bits each to one: 1536 into it."""
    part = identity_placements({"a": (8, 4), "b": (8, 4), "c": (8, 4)}, 0)

    def only(rank, *names):
        kept = tuple(p for p in part.placements if p.tensor in names)
        return RankPlacements(rank, {p.tensor: p.box.shape for p in kept}, kept, dict.fromkeys(names, (8, 4)))

    fast = Links(rank_gbps=1.0, node_gbps=1e6)
    swap = make_plan([only(0, "a"), only(1, "b")], [only(0, "b"), only(1, "a")])
    assert swap.traffic == {(0, 1): 32, (1, 0): 32}
    assert wire_seconds(swap, [0, 0], fast, 2) == pytest.approx(512e-9)
    into_one = make_plan([only(0, "a"), only(1, "b"), only(2, "c")], [only(3, "a", "b", "c")])
    assert wire_seconds(into_one, [0] * 4, fast, 2) == pytest.approx(1536e-9)
    assert wire_seconds(into_one, [0, 1, 2, 3], Links(rank_gbps=1e-6, node_gbps=1.0), 2) == pytest.approx(1536e-9)
    assert wire_seconds(make_plan([part], [part]), [0], fast, 2) == 0.0, "what a rank has does not travel"


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_overlapping_boxes_on_any_nodes(data):
    """Ranks that hold and want any boxes of one tensor: each element comes into a node at most once, as needed."""
    shape, ranks = (6, 5), range(4)
    value = torch.arange(30.0, dtype=torch.float64).view(shape)
    node_of = [data.draw(st.integers(0, 1)) for _ in ranks]

    def part(rank, whole):
        r, c = (sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape)
        box = Box.whole(shape) if whole else Box((r[0], c[0]), (r[1], c[1]))
        return RankPlacements(rank, {"t": box.shape}, (place_slice("w", box, "t", box.shape, (0, 0)),), {"w": shape})

    sources = [part(rank, rank == 0) for rank in ranks]
    wanted = [part(rank, False) for rank in ranks]
    live, expected = filled(sources, {"w": value}), filled(wanted, {"w": value})
    tiers = make_tiers(sources, wanted, node_of)
    filled_storages = empty(wanted)
    copy_in_memory(tiers.arrive, live, filled_storages)
    copy_in_memory(tiers.fan_out, filled_storages, filled_storages)
    assert all(torch.equal(filled_storages[rank]["t"], expected[rank]["t"]) for rank in ranks)
    plans = (tiers.arrive, tiers.fan_out)
    assert sum(c.numel for p in plans for c in p.copies) == sum(part.placements[0].box.numel for part in wanted)
    assert traffic_between_nodes(tiers.fan_out, node_of) == {}
    came_in = received_by_node(traffic_between_nodes(tiers.arrive, node_of), 2)
    for node in set(node_of):
        flags = torch.zeros(2, *shape, dtype=torch.bool)
        for side, parts in enumerate((wanted, sources)):
            for box in (p.placements[0].box for p in parts if node_of[p.rank] == node):
                flags[side][box.start[0] : box.stop[0], box.start[1] : box.stop[1]] = True
        assert came_in[node] == int((flags[0] & ~flags[1]).sum())
