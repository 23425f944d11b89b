"""Strided copies: the same elements as the copies they are made of, in fewer and longer ranges. Not covered: messages
over a group (`test_reshard.py`)."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.placement import Box, Placement
from megarlhf.weights.plan.copy_plan import Copy, make_plan
from megarlhf.weights.transport.messages import PairTransfer, StridedCopy, StridedView, coalesce
from megarlhf.weights.transport.random_init import fill_random
from tests.weights.cases import empty, megatron_ranks, tiny, vllm_ranks


def copy(shape, src, dst, src_strides=None, dst_strides=None):
    """From `src` to `dst`, (storage, offset) each; contiguous where no strides are given."""
    packed = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    box = Box((0,) * len(shape), tuple(shape))
    placed = (Placement("t", box, *src, src_strides or packed), Placement("t", box, *dst, dst_strides or packed))
    return Copy(0, placed[0], 1, placed[1])


def test_neighbours_at_both_ends_are_one_run():
    gate, up = copy((2, 8), ("fc1", 16), ("w13", 0)), copy((3, 8), ("fc1", 32), ("w13", 16))
    assert coalesce([gate, up]) == [StridedCopy((40,), StridedView("fc1", 16, (1,)), StridedView("w13", 0, (1,)))]


def test_neighbours_at_one_end_only_stay_apart():
    first = copy((2, 8), ("a", 0), ("d", 0))
    for second in (
        copy((2, 8), ("b", 16), ("d", 16)), copy((2, 8), ("a", 16), ("d", 24)), copy((2, 8), ("a", 24), ("d", 16)),
        copy((2, 8), ("a", 16), ("d", 16), dst_strides=(9, 1)),
    ):  # fmt: skip
        assert len(coalesce([first, second])) == 2


def test_dimensions_collapse_only_where_both_ends_allow():
    (merged,) = coalesce([copy((4, 1, 6), ("a", 0), ("d", 5), dst_strides=(12, 99, 1))])
    assert merged == StridedCopy((4, 6), StridedView("a", 0, (6, 1)), StridedView("d", 5, (12, 1)))
    assert merged.is_contiguous(merged.src)
    assert not merged.is_contiguous(merged.dst)
    (single,) = coalesce([copy((1, 1), ("a", 3), ("d", 5), (7, 7), (9, 9))])
    assert single.shape == (1,)
    assert single.is_contiguous(single.src)
    live = {"a": torch.arange(24), "d": torch.arange(60)}
    (flat,) = merged.views(merged.src, live, 3, 15)
    assert flat.tolist() == list(range(3, 15))
    assert [view.tolist() for view in merged.views(merged.dst, live, 3, 15)] == [
        [[8, 9, 10]], [[17, 18, 19, 20, 21, 22]], [[29, 30, 31]],
    ]  # fmt: skip


@given(
    st.sampled_from([(1, 1, 2), (2, 2, 2), (2, 1, 4), (4, 1, 2), (4, 2, 1)]),
    st.booleans(),
    st.lists(st.floats(0, 1), max_size=6),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_cuts_of_the_streams_carry_every_element(layout, tied, cuts):
    """Trainer tp x pp into engines of v: every pair's stream, cut anywhere, is gathered and scattered."""
    tp, pp, v = layout
    arch = tiny(num_key_value_heads=4, tie_word_embeddings=tied)
    sources = megatron_ranks(arch, tp, [[0], [1, 2]][:pp] if pp > 1 else [range(3)])
    ranks = vllm_ranks(arch, v, tp * pp // v if tp * pp > v else 1)
    src, dst, expected = (empty(parts, torch.float32, 0.0) for parts in (sources, ranks, ranks))
    for parts, live in ((sources, src), (ranks, expected)):
        for part in parts:
            fill_random(part, live[part.rank], seed=5, std=0.1, arch=arch)
    plan, merged = make_plan(sources, ranks), 0
    for (a, b), numel in plan.traffic.items():
        copies = [c for c in plan.copies if (c.src_rank, c.dst_rank) == (a, b)]
        stream = PairTransfer(copies)
        assert sum(copy.numel for copy in stream.copies) == numel
        merged += len(copies) - len(stream.copies)
        at = sorted({0, numel, *(int(cut * numel) for cut in cuts)})
        for elements in itertools.pairwise(at):
            slices = list(stream.slices([elements]))
            sent = [view.reshape(-1) for c, *range_ in slices for view in c.views(c.src, src[a], *range_)]
            into = [view for c, *range_ in slices for view in c.views(c.dst, dst[b], *range_)]
            message = torch.cat(sent)
            assert message.numel() == elements[1] - elements[0]
            for view, stretch in zip(into, message.split([view.numel() for view in into]), strict=True):
                view.copy_(stretch.view(view.shape))
    assert merged > 0 or tp != v
    for part in ranks:
        different = [n for n in dst[part.rank] if not torch.equal(dst[part.rank][n], expected[part.rank][n])]
        assert not different, different
