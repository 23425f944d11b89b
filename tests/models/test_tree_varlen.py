"""The calls of varlen_attn's two kernels by attention over trees. A stand-in has the kernels' place, which does what
the source of torch 2.11 and 2.13 says they do.

Not covered: the kernels, which need a GPU (`make test-gpu`, its check `prompts`).
"""

import inspect
import math

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from megarlhf.models.attention import tree as module
from megarlhf.models.attention.tree import Varlen, _varlen_kernels, kernel_for, merged_attention
from megarlhf.parallel.packing.rows import packed_row
from tests.models.test_packed_attention import with_gradients
from tests.models.trees import CPU, ROWS, alone, attention, close, inputs


class StandIn:
    """What `_varlen_attn` and `_varlen_attn_backward` do, by torch/nn/attention/varlen.py and the kernel's source:
    log-sum-exp [N, L]; the last query aligned with the last key; the backward believes the output and the log-sum-exp
    that it is given. Keys without queries get no gradient: what is in memory is left there.

    has_gqa_flag: torch 2.13's, which is told of query groups; 2.11's is not."""

    def __init__(self, has_gqa_flag: bool = True) -> None:
        self.has_gqa_flag = has_gqa_flag
        self.forwards: list[tuple[list[int], list[int], bool]] = []
        self.backwards: list[tuple[list[int], list[int], bool]] = []

    def forward(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, *enable_gqa):
        grouped = query.size(1) != key.size(1)
        assert enable_gqa == ((grouped,) if self.has_gqa_flag else ())
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
@pytest.mark.parametrize("scale, has_gqa_flag", [(None, True), (0.3, False)])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_varlens_kernels_are_called_as_they_want_it(row, groups, scale, has_gqa_flag):
    stand_in, trees = StandIn(has_gqa_flag), packed_row(row[0], CPU, parents=row[1]).trees
    kernel = Varlen(stand_in.forward, stand_in.backward, has_gqa_flag)
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
    has_gqa_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    assert found == (torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward, has_gqa_flag)
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
