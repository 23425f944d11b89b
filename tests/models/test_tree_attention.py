"""Attention over rows whose segments continue others: each sequence as if it stood alone.

Not covered: varlen_attn's kernels, which need a GPU (`make test-gpu`, its check `prompts`); a stand-in that does what
the source of torch 2.11 and 2.13 says they do has their place. That the work is counted as it is done:
tests/rehearsal/test_work.py.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megarlhf.kernels.backends import log_once
from megarlhf.models import tree_attention as module
from megarlhf.models.attention import with_packed_rows
from megarlhf.models.packed_attention import packed_attention
from megarlhf.models.tree_attention import (
    CpuFlash,
    Varlen,
    _varlen_kernels,
    kernel_for,
    merged_attention,
    plain_attention,
)
from megarlhf.parallel.packed_rows import ROOT, packed_row
from tests.models.test_packed_attention import with_gradients

CPU = torch.device("cpu")
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and parents."""


def random_row(depth: int, seed: int) -> Row:
    """Roots of which some are continued, levels in which some are, fillers behind."""
    draw = random.Random(seed)
    parents, level = [ROOT] * 5, range(5)
    for _ in range(depth - 1):
        children = [n for n in level for _ in range(draw.choice((0, 1, 2, 4)))] or [level[-1]]
        parents += children
        level = range(len(parents) - len(children), len(parents))
    parents += [ROOT] * draw.randrange(3)
    return tuple(draw.choice((1, 2, 5, 9, 17, 30)) for _ in parents), tuple(parents)


ROWS: dict[str, Row] = {
    "a pair": ((7, 4, 9), (-1, 0, 0)),
    "one token each": ((1, 1, 1), (-1, 0, 0)),
    "equal groups": ((8, 8, 8, *[6] * 9), (-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2)),
    "plain sequences around": ((6, 9, 5, 4, 3, 8, 11, 6), (-1, -1, -1, -1, 1, 1, 2, -1)),
    "long": ((200, 70, 130, 90, 150, 64), (-1, -1, 0, 0, 1, -1)),
    "a chain": ((5, 4, 7, 1, 9), (-1, 0, 1, 2, 3)),
    **{f"depth 2, {seed}": random_row(2, seed) for seed in range(3)},
    **{f"depth 4, {seed}": random_row(4, seed) for seed in range(3)},
}


def inputs(row: Row, groups: int, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient; four heads."""
    generator = torch.Generator().manual_seed(sum(row[0]) + groups)
    shapes = [(sum(row[0]), n, head_dim) for n in (4, groups, groups, 4)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def attention(query, key, value, scale, seen) -> tuple[Tensor, Tensor]:
    """Softmax of scores, and their log-sum-exp [N, L], of the pairs [L, K] that are seen."""
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = torch.einsum("ind,jnd->nij", query, key) * (1 / math.sqrt(query.size(2)) if scale is None else scale)
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("nij,jnd->ind", scores.softmax(-1), value), scores.logsumexp(-1)


def way_to(n: int, parents) -> list[int]:
    return [*(way_to(parents[n], parents) if parents[n] != ROOT else []), n]


def alone(query, key, value, row: Row, scale, window) -> Tensor:
    """Each segment as the end of its sequence from the root, which is computed without any other."""
    lengths, parents = row
    segments = [x.split(lengths) for x in (query, key, value)]
    ends = []
    for n, length in enumerate(lengths):
        q, k, v = (torch.cat([parts[i] for i in way_to(n, parents)]) for parts in segments)
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - (window or len(q)))
        ends.append(attention(q, k, v, scale, seen)[0][-length:])
    return torch.cat(ends)


def close(actual, expected, **band) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **(band or {"rtol": 1e-10, "atol": 1e-11}))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 4, 12, 1000])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_continuation_as_the_sequence_alone(row, groups, window):
    """Output and gradients, which for shared keys and values are sums over the sequences. Windows smaller than a
    response, into the prompt, and larger than all."""
    scale = 0.3 if groups == 2 else None
    packed, given = packed_row(row[0], CPU, parents=row[1]), inputs(row, groups)
    actual = with_gradients(lambda *x: packed_attention(*x, packed, scale=scale, window=window), *given)
    close(actual, with_gradients(lambda *x: alone(*x, row, scale, window), *given))
    assert actual[0].is_contiguous()


@pytest.mark.parametrize("head_dim", [5, 64, 80])
@pytest.mark.parametrize("name", ["plain sequences around", "long", "depth 4, 1"])
def test_merged_is_plain(name, head_dim):
    row = ROWS[name]
    trees, given = packed_row(row[0], CPU, parents=row[1]).trees, inputs(row, 2, head_dim)
    merged = with_gradients(lambda *x: merged_attention(*x, trees, CpuFlash(), scale=None), *given)
    close(merged, with_gradients(lambda *x: plain_attention(*x, trees, scale=None, window=None), *given))


def test_large_scores_are_merged_without_overflow():
    """A prompt's scores far above and far below those of its continuations."""
    row = ((6, 5, 5), (-1, 0, 0))
    query, key, value, gradient = inputs(row, 4)
    key[:3], key[3:6] = 1e4 * key[:3], -1e4 * key[3:6]
    trees = packed_row(row[0], CPU, parents=row[1]).trees
    merged = with_gradients(lambda *x: merged_attention(*x, trees, CpuFlash(), scale=1.0), query, key, value, gradient)
    expected = with_gradients(lambda *x: alone(*x, row, 1.0, None), query, key, value, gradient)
    close(merged, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("name", ["equal groups", "long", "a chain", "depth 4, 0"])
def test_16_bits_within_a_band_of_fp64(name, dtype, bits):
    """Of the largest number: 2 widths of a rounding for the output, 4 for gradients. One is off by half a width."""
    row = ROWS[name]
    packed, given = packed_row(row[0], CPU, parents=row[1]), inputs(row, 2, 16, dtype)
    actual = with_gradients(lambda *x: packed_attention(*x, packed, scale=None, window=None), *given)
    expected = with_gradients(lambda *x: alone(*x, row, None, None), *(x.double() for x in given))
    for widths, ours, theirs in zip((2, 4, 4, 4), actual, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= widths * 2**-bits * theirs.abs().max()


def test_deep_trees_round_sums_once():
    """16 segments, each the continuation of the one before: errors stay below the width of a rounding, and would be 1.5
    and 1.6 widths in the gradients of keys and values were each of 15 additions rounded."""
    row = ((9, *[5] * 15), tuple(range(-1, 15)))
    packed, given = packed_row(row[0], CPU, parents=row[1]), inputs(row, 2, 16, torch.bfloat16)
    actual = with_gradients(lambda *x: packed_attention(*x, packed, scale=None, window=None), *given)
    expected = with_gradients(lambda *x: alone(*x, row, None, None), *(x.double() for x in given))
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.double() - theirs).norm() < 2**-8 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
def test_nothing_crosses_from_one_continuation_to_another(window, dtype):
    """One of three responses of the middle prompt is other: all else keeps its bits, but for the gradients of the
    prompt's keys and values."""
    lengths, parents = (20, 30, 10, 8, 5, 9, 70, 9, 12, 7), (-1, -1, -1, 0, 0, 1, 1, 1, 2, -1)
    packed, given = packed_row(lengths, CPU, parents=parents), inputs((lengths, parents), 2, 16, dtype)
    before = with_gradients(lambda *x: packed_attention(*x, packed, scale=None, window=window), *given)
    start = sum(lengths[:6])
    own, prompt = slice(start, start + 70), slice(20, 50)
    changed = [x.clone() for x in given]
    for x in changed:
        x[own] = 100 * torch.randn(x[own].shape).to(dtype)
    after = with_gradients(lambda *x: packed_attention(*x, packed, scale=None, window=window), *changed)
    for what, old, new in zip(("out", "query", "key", "value"), before, after, strict=True):
        kept = torch.ones(len(old), dtype=torch.bool)
        kept[own] = False
        if what in ("key", "value"):
            kept[prompt] = False
            assert not torch.equal(old[prompt], new[prompt])
        assert torch.equal(old[kept], new[kept])
        assert not torch.equal(old[own], new[own])


def test_parts_of_a_fused_projection_and_an_expanded_gradient():
    """As a model hands them over: query, key and value are views, and the gradient of a sum repeats one number."""
    row = ROWS["depth 4, 2"]
    fused = torch.randn(sum(row[0]), 8, 8, dtype=torch.float64).requires_grad_()
    packed = packed_row(row[0], CPU, parents=row[1])
    found = []
    for attend in (
        lambda *x: packed_attention(*x, packed, scale=None, window=None),
        lambda *x: alone(*x, row, None, None),
    ):
        out = attend(*fused.split([4, 2, 2], 1))
        found.append((out, *torch.autograd.grad(out.sum(), fused)))
    close(*found)


def test_heads_that_do_not_lie_in_a_piece():
    """The kernels take a stride for each axis but the last."""
    row = ROWS["depth 2, 1"]
    packed, given = packed_row(row[0], CPU, parents=row[1]), inputs(row, 2)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    assert turned[0].stride(-1) != 1
    attend = lambda *x: packed_attention(*x, packed, scale=None, window=None)  # noqa: E731
    for plain, other in zip(with_gradients(attend, *given), with_gradients(attend, *turned), strict=True):
        assert torch.equal(plain, other)


# --- what is kept, and which way -------------------------------------------------------------------


def test_inputs_output_and_one_log_sum_exp_are_saved():
    row = ROWS["depth 4, 0"]
    query, key, value, _ = (x.requires_grad_() for x in inputs(row, 2))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = packed_attention(query, key, value, packed_row(row[0], CPU, parents=row[1]), scale=None, window=None)
    assert [tuple(x.shape) for x in saved] == [*(tuple(x.shape) for x in (query, key, value, out)), query.shape[:2]]
    assert [x.data_ptr() for x in saved[:4]] == [x.data_ptr() for x in (query, key, value, out)]


@pytest.mark.parametrize(
    "device, dtype, head_dim, window, kernel, why",
    [
        ("cpu", torch.bfloat16, 64, None, CpuFlash, "flash attention on a CPU"),
        ("cpu", torch.float64, 5, None, CpuFlash, "flash attention on a CPU"),
        ("cpu", torch.float32, 64, 9, None, "a sliding window"),
        ("cuda", torch.bfloat16, 64, None, Varlen, "16 on a GPU"),
        ("cuda", torch.bfloat16, 64, 9, None, "a sliding window"),
        ("cuda", torch.float32, 64, None, None, "takes fp16 and bf16"),
        ("cuda", torch.bfloat16, 20, None, None, "in steps of 8"),
    ],
)
def test_which_way_a_row_goes(device, dtype, head_dim, window, kernel, why):
    found, reason = kernel_for(device, dtype, head_dim, window)
    assert type(found) is (type(None) if kernel is None else kernel)
    assert why in reason


def test_the_way_is_logged_once_with_its_reason(caplog):
    row = ROWS["a pair"]
    packed, given = packed_row(row[0], CPU, parents=row[1]), inputs(row, 2)[:3]
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, module.__name__):
        for window in (None, 16, 15, 15, 100):
            packed_attention(*given, packed, scale=None, window=window)
    assert caplog.messages == [
        "attention over rows of trees: merged (flash attention on a CPU)",
        "attention over rows of trees: plain (a sliding window sees a part of what comes before)",
    ]


def test_transformer_engine_is_not_asked():
    class Core:
        def __init__(self, config, layer_number, softmax_scale=None): ...

        def forward(self, *args, **named):
            raise AssertionError("its thd gives no log-sum-exp")

    row = ROWS["plain sequences around"]
    packed, given = packed_row(row[0], CPU, parents=row[1]), inputs(row, 2, dtype=torch.bfloat16)[:3]
    layer = with_packed_rows(Core)(SimpleNamespace(context_parallel_size=1, window_size=None), 1, softmax_scale=0.5)
    out = layer.forward(*(x[:, None] for x in given), None, packed_seq_params=packed)
    assert torch.equal(out, packed_attention(*given, packed, scale=0.5, window=None).flatten(1)[:, None])


@pytest.mark.parametrize(
    "parents, said",
    [
        ((-1, -1, 0, 1, 0), "segment 4, at level 1, continues 0 and stands behind segment 3, .*continues 1"),
        ((-1, 0, 1, 0), "segment 3, at level 1, continues 0 and stands behind segment 2, at level 2"),
        ((-1, 0, -1, 0), "a root stands between the segments 1 and 3"),
        ((-1, 2, 0), "segment 1 continues 2, which does not stand before it"),
    ],
)
def test_a_row_in_another_order_is_refused(parents, said):
    with pytest.raises(AssertionError, match=said):
        _ = packed_row([3] * len(parents), CPU, parents=parents).trees


# --- the two kernels of varlen_attn ----------------------------------------------------------------


class StandIn:
    """What `_varlen_attn` and `_varlen_attn_backward` do, by torch/nn/attention/varlen.py and the kernel's source:
    log-sum-exp [N, L]; the last query aligned with the last key; the backward believes the output and the log-sum-exp
    that it is given. Keys without queries get no gradient: what is in memory is left there.

    says_groups: torch 2.13's, which is told of query groups; 2.11's is not."""

    def __init__(self, says_groups: bool = True) -> None:
        self.says_groups = says_groups
        self.forwards: list[tuple[list[int], list[int], bool]] = []
        self.backwards: list[tuple[list[int], list[int], bool]] = []

    def forward(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, *enable_gqa):
        grouped = query.size(1) != key.size(1)
        assert enable_gqa == ((grouped,) if self.says_groups else ())
        # From one query a block and fewer groups than heads it makes one row of heads, of blocks that all have one.
        assert is_causal or not grouped or max_q > 1 or cu_seq_q.diff().eq(1).all()
        out, lse = torch.full_like(query, math.nan), query.new_full((query.size(1), len(query)), math.nan)
        longest = (int(cu_seq_q.diff().max()), max_k)
        assert max_q in (longest[0], 2)
        blocks = self._blocks(query, key, cu_seq_q, cu_seq_k, *longest, is_causal, window_size)
        self.forwards.append((cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist(), is_causal))
        for at, keys, seen in blocks:
            out[at], lse[:, at] = attention(query[at], key[keys], value[keys], scale, seen)
        return out, lse, torch.zeros(2, dtype=torch.uint64)

    def backward(
        self, grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale,
        window_size,
    ):  # fmt: skip
        assert (grad_out.shape, out.shape, lse.shape) == (query.shape, query.shape, (query.size(1), len(query)))
        assert lse.is_contiguous(), "the kernel has no strides of it"
        assert (rng_state.shape, rng_state.dtype) == ((2,), torch.uint64)
        scale = 1 / math.sqrt(query.size(2)) if scale is None else scale
        found = [torch.full_like(x, math.nan) for x in (query, key, value)]
        blocks = self._blocks(query, key, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size)
        self.backwards.append((cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist(), is_causal))
        for at, keys, seen in blocks:
            heads = query.size(1) // key.size(1)
            q, g, (k, v) = query[at], grad_out[at], (x[keys].repeat_interleave(heads, 1) for x in (key, value))
            scores = (torch.einsum("ind,jnd->nij", q, k) * scale).masked_fill(~seen, -math.inf)
            p = (scores - lse[:, at, None]).exp()
            delta = (g * out[at]).sum(-1).t()[:, :, None]
            ds = p * (torch.einsum("ind,jnd->nij", g, v) - delta) * scale
            found[0][at] = torch.einsum("nij,jnd->ind", ds, k)
            of_heads = torch.einsum("nij,ind->jnd", ds, q), torch.einsum("nij,ind->jnd", p, g)
            for x, part in zip(found[1:], of_heads, strict=True):
                x[keys] = part.unflatten(1, (-1, heads)).sum(2)
        return tuple(found)

    def _blocks(self, query, key, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert window_size == ([-1, 0] if is_causal else [-1, -1])
        (first_q, *_, last_q), (first_k, *_, last_k) = cu_seq_q.tolist(), cu_seq_k.tolist()
        assert (first_q, last_q, first_k, last_k) == (0, len(query), 0, len(key))
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
        for n in range(len(cu_seq_q) - 1):
            queries, keys = (slice(int(x[n]), int(x[n + 1])) for x in (cu_seq_q, cu_seq_k))
            num_q, num_k = queries.stop - queries.start, keys.stop - keys.start
            seen = torch.ones(num_q, num_k, dtype=torch.bool)
            if num_q:
                yield queries, keys, seen.tril(num_k - num_q) if is_causal else seen


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("scale, says_groups", [(None, True), (0.3, False)])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_varlens_kernels_are_called_as_they_want_it(row, groups, scale, says_groups):
    stand_in, trees = StandIn(says_groups), packed_row(row[0], CPU, parents=row[1]).trees
    kernel = Varlen(stand_in.forward, stand_in.backward, says_groups)
    given = inputs(row, groups)
    actual = with_gradients(lambda *x: merged_attention(*x, trees, kernel, scale=scale), *given)
    close(actual, with_gradients(lambda *x: alone(*x, row, scale, None), *given))
    # One call for all segments with themselves, and one for each level with each level above it.
    levels = len(trees.levels)
    assert len(stand_in.forwards) == len(stand_in.backwards) == 1 + levels * (levels + 1) // 2
    assert stand_in.forwards == stand_in.backwards
    assert stand_in.forwards[0] == (list(row[0]), list(row[0]), True)
    assert not any(causal for _, _, causal in stand_in.forwards[1:])


def test_the_calls_of_two_levels_by_hand():
    """Roots of 2, 3, 4 and 5 tokens, of which the second and the fourth are continued, and a filler."""
    lengths, parents = (2, 3, 4, 5, 7, 6, 1, 8), (-1, -1, -1, -1, 1, 1, 3, -1)
    stand_in, trees = StandIn(), packed_row(lengths, CPU, parents=parents).trees
    given = inputs((lengths, parents), 2)[:3]
    merged_attention(*given, trees, Varlen(stand_in.forward, stand_in.backward), scale=None)
    assert stand_in.forwards == [([*lengths], [*lengths], True), ([13, 0, 1], [3, 4, 5], False)]
    (part,) = trees.levels[0].ancestors
    assert (part.queries, part.keys, part.seen) == (slice(14, 28), slice(2, 14), (slice(0, 3), slice(7, 12)))
    assert [(run.query, run.key, run.shapes) for run in part.runs] == [(14, 2, ((13, 3),)), (27, 9, ((1, 5),))]


def test_one_token_behind_one_of_several_prompts():
    """The longest block has one query, and the one between has none: the kernel is not told so, or it would take it
    that each has one."""
    row = ((3, 4, 5, 1, 1), (-1, -1, -1, 0, 2))
    stand_in, trees, given = StandIn(), packed_row(row[0], CPU, parents=row[1]).trees, inputs(row, 2)
    kernel = Varlen(stand_in.forward, stand_in.backward)
    actual = with_gradients(lambda *x: merged_attention(*x, trees, kernel, scale=None), *given)
    close(actual, with_gradients(lambda *x: alone(*x, row, None, None), *given))
    assert stand_in.forwards[1] == ([1, 0, 1], [3, 4, 5], False)


def test_the_installed_torch_has_the_kernels(monkeypatch):
    """And one that has others, or none, goes the plain way. What 2.11 has is told of no groups."""
    found = _varlen_kernels()
    says_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    assert found == (torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward, says_groups)
    _varlen_kernels.cache_clear()
    try:
        monkeypatch.setattr(module, "GROUPED", "another")
        assert _varlen_kernels() == (*found[:2], False)
        _varlen_kernels.cache_clear()
        monkeypatch.setattr(module, "BACKWARD", module.BACKWARD.replace("rng_state", "philox"))
        assert kernel_for("cuda", torch.bfloat16, 64, None)[0] is None
        assert "2.11 has" in kernel_for("cuda", torch.bfloat16, 64, None)[1]
        _varlen_kernels.cache_clear()
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        assert kernel_for("cuda", torch.bfloat16, 64, None)[0] is None
    finally:
        _varlen_kernels.cache_clear()


@pytest.mark.parametrize("turned", [True, False])
def test_a_part_of_a_projection_does_not_keep_all_of_it(turned: bool) -> None:
    """Where queries and keys are turned, they, values, output and statistics are kept; otherwise the projection, of
    which all three are parts, and the last two."""
    tokens, heads, width = 12, 4, 16
    product = torch.randn(tokens, 3 * heads, width, requires_grad=True) * 1.0
    query, key, value = product.split(heads, dim=1)
    if turned:
        query, key = query * 2.0, key * 2.0
    trees = packed_row([4, 3, 5], torch.device("cpu"), parents=[-1, 0, 0]).trees
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        merged_attention(query, key, value, trees, CpuFlash(), scale=None)
    one = 4 * tokens * heads * width
    assert sum(kept.values()) == 4 * one + 4 * tokens * heads
    assert len(kept) == (5 if turned else 3)
