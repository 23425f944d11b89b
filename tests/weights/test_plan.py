"""Copy plans: exact cover, nothing sent in vain, balance, and the least possible traffic for a 70B model."""

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import hf_placements, identity_placements
from megarlhf.placement import Box, Placement, RankPlacements, flat_boxes
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.schedule import rank_rounds
from megarlhf.weights.transport.storages import view as placement_view
from tests.refuses import refuses
from tests.weights.cases import (
    LLAMA_70B,
    copy_in_memory,
    empty,
    megatron_ranks,
    place_slice,
    random_logical,
    tiny,
    vllm_ranks,
)

layouts = st.tuples(st.sampled_from(["megatron", "vllm", "hf"]), st.randoms(use_true_random=False))


def draw_ranks(arch, kind, random):
    if kind == "hf":
        return [hf_placements(arch, rank=random.randrange(4))]
    if kind == "vllm":
        return vllm_ranks(arch, random.choice([1, 2, 4]), random.choice([1, 2]))
    cut = sorted(random.choices(range(4), k=random.choice([0, 1, 2])))
    bounds = [0, *cut, 3]
    stages = [range(a, b) for a, b in itertools.pairwise(bounds)]
    ranks = megatron_ranks(arch, random.choice([1, 2]), stages, random.choice([1, 2]))
    order = random.sample(range(len(ranks)), len(ranks))
    return [part.on_rank(rank) for part, rank in zip(ranks, order, strict=True)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_layout_to_any_other(data):
    """Every destination element is written once, with the right value; no rank is sent what it holds."""
    tied = data.draw(st.booleans())
    arch = tiny(tie_word_embeddings=tied, hidden_size=8, head_dim=2, intermediate_size=12)
    logical = random_logical(arch)
    kinds = st.sampled_from(["megatron", "vllm", "hf"])
    random = data.draw(st.randoms(use_true_random=False))
    sources = draw_ranks(arch, data.draw(kinds), random)
    destinations = draw_ranks(arch, data.draw(kinds), random)
    src = empty(sources)
    copy_in_memory(make_plan([hf_placements(arch, rank=77)], sources), {77: logical}, src)
    plan = make_plan(sources, destinations)

    writes = empty(destinations, fill=0.0)
    source_by_rank = {part.rank: part for part in sources}
    for copy in plan.copies:
        view = placement_view(copy.dst, writes[copy.dst_rank])
        view += 1
        if copy.src_rank != copy.dst_rank and copy.dst_rank in source_by_rank:
            own = (p.box for p in source_by_rank[copy.dst_rank].placements if p.tensor == copy.tensor)
            assert all(box.intersect(copy.box) is None for box in own)
    for part in destinations:
        expected = empty([part], fill=1.0)[part.rank]
        for name, gaps in part.padding().items():
            for start, stop in gaps:
                expected[name].view(-1)[start:stop] = 0
        for name, count in writes[part.rank].items():
            assert torch.equal(count, expected[name]), name

    dst = empty(destinations)
    copy_in_memory(plan, src, dst)
    back = empty([hf_placements(arch, rank=77)])
    copy_in_memory(make_plan(destinations, [hf_placements(arch, rank=77)]), dst, back)
    assert all(torch.equal(back[77][name], value) for name, value in logical.items())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_overlapping_transposed_fragments(data):
    """Sources that overlap in any way, some stored transposed: the rest of the algebra, beyond our tables."""
    shape = (6, 5)
    value = torch.arange(30.0).view(shape)
    parts, live = [identity_placements({"w": shape}, 0)], {0: {"w": value}}
    for rank in range(1, data.draw(st.integers(1, 4)) + 1):
        r = sorted(data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True)))
        c = sorted(data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)))
        box = Box((r[0], c[0]), (r[1], c[1]))
        rows, columns = box.shape
        placement = Placement("w", box, "t", 0, (1, rows))
        parts.append(RankPlacements(rank, {"t": (columns, rows)}, (placement,), {"w": shape}))
        live[rank] = {"t": value[r[0] : r[1], c[0] : c[1]].t().contiguous()}
    rank = data.draw(st.integers(0, len(parts)))
    wanted = identity_placements({"w": shape}, rank)
    plan = make_plan(parts, [wanted])
    dst = empty([wanted], torch.float32)
    copy_in_memory(plan, live, dst)
    assert torch.equal(dst[rank]["w"], value)
    assert sum(copy.numel for copy in plan.copies) == 30
    own = sum(p.box.numel for part in parts if part.rank == rank for p in part.placements)
    assert sum(copy.numel for copy in plan.local(rank)) == own


@pytest.mark.parametrize("tp, pp, dp, engine_tp, average, largest", [
    (8, 4, 2, 8, 13.23, 13.36), (8, 4, 2, 4, 34.18, 35.28), (8, 1, 4, 8, 0.01, 0.02), (8, 8, 1, 8, 15.44, 15.50),
])  # fmt: skip
def test_least_traffic_of_a_70b_model(tp, pp, dp, engine_tp, average, largest):
    """GB received per rank (bf16) equals need minus what is held; senders are balanced; seconds to plan."""
    arch = architecture_from_hf(LLAMA_70B)
    layers = 80 // pp
    sources = megatron_ranks(arch, tp, [range(p * layers, (p + 1) * layers) for p in range(pp)], dp)
    ranks = len(sources)
    start = time.process_time()
    plan = make_plan(sources, vllm_ranks(arch, engine_tp, ranks // engine_tp), only_rank=0)
    assert time.process_time() - start < 20
    received = [plan.elements_received(r) * 2e-9 for r in range(ranks)]
    assert sum(received) / ranks == pytest.approx(average, abs=0.006)
    assert max(received) == pytest.approx(largest, abs=0.006)
    assert max(plan.elements_sent(r) * 2e-9 for r in range(ranks)) < 1.1 * max(largest, 0.02) + 0.3


def test_one_ranks_view_is_the_plan():
    arch = tiny()
    sources, destinations = megatron_ranks(arch, 2, [[0], [1, 2]], 2), vllm_ranks(arch, 4, 2)
    plan = make_plan(sources, destinations)
    for rank in range(8):
        own = make_plan(sources, destinations, only_rank=rank)
        assert own.traffic == plan.traffic
        assert own.local(rank) == plan.local(rank)
        assert own.sends(rank) == plan.sends(rank)
        assert own.receives(rank) == plan.receives(rank)
        assert plan.sends(rank) == {p: plan.receives(p)[rank] for p in plan.sends(rank)}
    assert sum(plan.elements_sent(r) for r in range(8)) > 0
    with refuses("rank 1", "only_rank=0"):
        make_plan(sources, destinations, only_rank=0).local(1)


def test_replicas_share_the_sending():
    """Four strangers want one tensor that two replicas hold: two each."""
    sources = [identity_placements({"w": (8, 4)}, rank) for rank in (0, 1)]
    plan = make_plan(sources, [identity_placements({"w": (8, 4)}, rank) for rank in (2, 3, 4, 5)])
    assert [plan.elements_sent(r) for r in (0, 1)] == [64, 64]


def test_missing_and_disagreeing_sources():
    arch = tiny()
    stages = megatron_ranks(arch, 2, [[0], [1, 2]])
    with refuses("model.layers.1.self_attn.q_proj.weight[32:64, 0:64]", "14 boxes") as error:
        make_plan(stages[:3], vllm_ranks(arch, 1))
    # 14: 7 split tensors of 2 layers; its vocabulary rows are padding
    assert "model.layers.0" not in str(error.value)
    with refuses("147 boxes", "127 more", "every source"):
        make_plan([stages[0].select(())], megatron_ranks(tiny(num_hidden_layers=12), 1, [range(12)]))
    with refuses("shape", "rank", "config.json"):
        make_plan([hf_placements(arch)], vllm_ranks(tiny(intermediate_size=128), 1))
    with refuses("ranks [0]", "more than once"):
        make_plan([stages[0], stages[0]], vllm_ranks(arch, 1))


def test_double_placement_is_found():
    storage = (4, 2)
    placements = tuple(
        place_slice(name, Box((0, 0), (3, 2)), "s", storage, (row, 0)) for name, row in (("a", 0), ("b", 1))
    )
    with refuses("element 2", "storage s", "placed twice"):
        RankPlacements(0, {"s": storage}, placements, {"a": (3, 2), "b": (3, 2)}).padding()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_flat_boxes_hold_exactly_the_range_in_order(shape, data):
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, index.numel())] * 2)))
    pieces = [
        index[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1)
        for box in flat_boxes(tuple(shape), start, stop)
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).tolist() == list(range(start, stop))
    assert len(pieces) <= 2 * len(shape) - 1


@given(
    st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(1, 200), max_size=20),
    st.integers(1, 70),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_rounds_carry_everything_within_the_bucket(traffic, capacity):
    """Both ends agree in every round; no rank exceeds the bucket either way; each element travels once."""
    seen = {pair: [] for pair in traffic if pair[0] != pair[1]}
    for rank in range(6):
        for number in rank_rounds(traffic, rank, capacity):
            for peers in (number.sends, number.receives):
                assert sum(b - a for ranges in peers.values() for a, b in ranges) <= capacity
                assert list(peers) == sorted(peers)
            for peer, ranges in number.sends.items():
                seen[rank, peer] += ranges
    ends = {
        pair: [s for n in rank_rounds(traffic, pair[1], capacity) for s in n.receives.get(pair[0], ())] for pair in seen
    }
    assert seen == ends
    for pair, ranges in seen.items():
        covered = [i for a, b in ranges for i in range(a, b)]
        assert covered == list(range(traffic[pair]))
