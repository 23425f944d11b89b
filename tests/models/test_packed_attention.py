"""Attention over packed rows: each sequence by itself, whatever stands before and after it in the row.

Not covered: varlen_attn's kernel and transformer-engine's own attention (both need a GPU; here is what they are called
with), several ranks (tests/distributed).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.models.packed_attention import packed_attention
from megarlhf.parallel.packed_rows import packed_row

CPU = torch.device("cpu")
D = 8

ROWS: dict[str, tuple[int, ...]] = {
    "one token": (1,),
    "one sequence": (13,),
    "equal lengths": (6, 6, 6, 6),
    "in order of length": (40, 40, 17, 16, 15, 15, 3, 1, 1),
    "in no order": (3, 17, 1, 40, 15, 2, 17, 1, 6, 40, 5),
    "many": tuple(1 + 7 * n % 23 for n in range(60)),
    "long": (300, 2, 190, 129, 128, 1),
}


def inputs(num_tokens: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(num_tokens + 10 * groups)
    shapes = [(num_tokens, n, D) for n in (heads, groups, groups, heads)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def with_gradients(function, query, key, value, gradient) -> tuple[Tensor, ...]:
    """Output and the gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def by_hand(query, key, value, lengths, scale, window) -> Tensor:
    """Scores of all pairs of a sequence, those that do not count at -inf, softmax, sum."""
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        behind = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        seen = (behind >= 0) & (behind < (window or len(q)))
        scores = torch.einsum("ind,jnd->nij", q, k) * (1 / math.sqrt(D) if scale is None else scale)
        parts.append(torch.einsum("nij,jnd->ind", scores.masked_fill(~seen, -math.inf).softmax(-1), v))
    return torch.cat(parts)


def one_by_one(query, key, value, lengths, scale, window) -> Tensor:
    """torch's attention on each sequence."""
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril().triu(1 - (window or len(q)))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 1, 3, 20, 100, 1000])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_each_sequence_by_itself_as_by_hand(lengths, groups, window):
    scale = 0.3 if groups == 2 else None
    given = inputs(sum(lengths), 4, groups)
    row = packed_row(lengths, CPU)
    found = with_gradients(lambda *x: packed_attention(*x, row, scale=scale, window=window), *given)
    expected = with_gradients(lambda *x: by_hand(*x, lengths, scale, window), *given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    assert found[0].is_contiguous()


@pytest.mark.parametrize("window", [None, 8])
def test_fp32_errs_no_more_than_torch_does_on_each_sequence(window):
    """Largest error of output and gradients against fp64."""
    lengths = ROWS["long"] + ROWS["in no order"]
    given = inputs(sum(lengths), 4, 2)
    row = packed_row(lengths, CPU)
    truth = with_gradients(lambda *x: by_hand(*x, lengths, None, window), *given)
    rounded = tuple(x.float() for x in given)
    found = with_gradients(lambda *x: packed_attention(*x, row, scale=None, window=window), *rounded)
    usual = with_gradients(lambda *x: one_by_one(*x, lengths, None, window), *rounded)
    for ours, torchs, exact in zip(found, usual, truth, strict=True):
        error, bound = (ours - exact).abs().max(), (torchs - exact).abs().max()
        assert 0 < error <= 2 * bound
