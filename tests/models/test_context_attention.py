"""Attention of a share of each sequence, rank by rank in one process, and what the shares are.

Not covered: the messages between ranks (tests/parallel/test_context.py), and varlen_attn's kernel, which needs a GPU;
here is what it is called with.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from megarlhf.models.attention import past as module
from megarlhf.models.attention.packed import chunks_by_runs, varlen_attention
from megarlhf.models.attention.past import _varlen_attn, attend_to_the_past
from megarlhf.parallel.context import zigzag
from megarlhf.parallel.packing.rows import packed_row
from tests.models.test_packed_attention import CPU, by_hand, inputs, with_gradients
from tests.refuses import refuses


def group(cp, rank):
    """What a share asks of its group before any message."""
    return SimpleNamespace(size=lambda: cp, rank=lambda: rank)


ROWS = {
    (2, "one sequence"): (4,), (2, "in no order"): (12, 4, 4, 40, 8), (2, "long"): (320, 4, 140, 140),
    (3, "in no order"): (12, 6, 42, 6, 300), (4, "equal lengths"): (16, 16, 16), (4, "long"): (560, 8),
}  # fmt: skip


def test_the_zigzag_by_hand():
    """Sequences of 8 and 4 tokens on two ranks: chunks of two and of one."""
    assert zigzag((8, 4), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag((8, 4), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    with refuses("4 equal chunks", "6 tokens", error=AssertionError):
        zigzag((8, 6), 2, 0)


def test_a_share_by_hand():
    row = packed_row((8, 4), CPU, group(2, 1))
    assert row.positions_T.tolist() == [2, 3, 4, 5, 1, 2]
    assert row.share.place_S.tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]
    assert row.share.gathered_S[row.share.place_S].tolist() == list(range(12))
    assert (row.num_tokens, row.num_local_tokens) == (12, 6)
    assert row.share.cut(torch.arange(12)[None]).tolist() == [[2, 3, 4, 5, 9, 10]]
    assert row.thd().cu_seqlens_q.tolist() == [0, 8, 12], "whole sequences, which TransformerEngine divides itself"
    assert row.chunks.borders.cu_queries.tolist() == [0, 2, 4, 5, 6]
    assert row.chunks.borders.cu_keys.tolist() == [0, 4, 10, 12, 15]
    assert row.chunks.keys_V.tolist() == [0, 1, 2, 3, *range(6), 8, 9, 8, 9, 10]


def documented(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """varlen_attn as its documentation has it: the last query of a sequence is aligned with its last key."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys))
    assert (len(query), len(key), len(value)) == (sum(queries), sum(keys), sum(keys))
    assert window_size[1] == 0
    assert enable_gqa == (query.size(1) != key.size(1))
    window = None if window_size[0] == -1 else window_size[0] + 1
    parts = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        padded = torch.cat([q.new_zeros(len(k) - len(q), *q.shape[1:]), q])
        parts.append(by_hand(padded, k, v, [len(k)], scale, window)[len(k) - len(q) :])
    return torch.cat(parts)


@pytest.fixture(params=["runs", "varlen"])
def attend(request, monkeypatch):
    if request.param == "runs":
        yield chunks_by_runs
        return
    _varlen_attn.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", documented)
    yield varlen_attention
    _varlen_attn.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 3, 70, 1000])
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("cp, lengths", [(cp, lengths) for (cp, _), lengths in ROWS.items()], ids=map(str, ROWS))
def test_the_shares_together_are_the_whole(cp, lengths, groups, window, attend):
    """Output and gradients in fp64, those of keys and values summed over the ranks."""
    scale = 0.3 if groups == 1 else None
    query, key, value, gradient = inputs(sum(lengths), 4, groups)
    expected = with_gradients(lambda *x: by_hand(*x, lengths, scale, window), query, key, value, gradient)
    actual = [torch.zeros_like(x) for x in expected]
    for rank in range(cp):
        row = packed_row(lengths, CPU, group(cp, rank))
        own = row.share.own_S
        out, query_grad, key_grad, value_grad = with_gradients(
            lambda *x, row=row: attend(*x, row, scale=scale, window=window), query[own], key, value, gradient[own]
        )
        actual[0][own], actual[1][own] = out, query_grad
        actual[2] += key_grad
        actual[3] += value_grad
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("cp", [2, 4])
def test_every_rank_has_its_part_of_the_work(cp, window, monkeypatch):
    """Pairs whose scores are computed, those that are masked included: on each rank the same within a tenth, and at
    most 15% more than a part of what causal attention needs; with a window 60%, as without context parallelism."""
    length = 8192
    needed = sum(min(t + 1, window or length) for t in range(length))
    pairs, original = [0] * cp, module._attend
    for rank in range(cp):

        def counting(query, key, value, rank=rank, **how):
            square = query.size(1) * key.size(1)
            pairs[rank] += square // 2 if how.get("is_causal") else square
            return query

        monkeypatch.setattr(module, "_attend", counting)
        row = packed_row((length,), CPU, group(cp, rank))
        query, key = torch.zeros(length // cp, 1, 8), torch.zeros(length, 1, 8)
        chunks_by_runs(query, key, key, row, scale=None, window=window)
    monkeypatch.setattr(module, "_attend", original)
    assert max(pairs) <= 1.1 * min(pairs)
    assert needed / cp < max(pairs) < (1.15 if window is None else 1.6) * needed / cp


@pytest.mark.parametrize("window", [None, 200])
def test_fp32_errs_as_the_whole_does(window):
    """Largest error of the output against fp64, of the shares and of all at once."""
    query, key, value, _ = inputs(1200, 4, 2)
    truth = by_hand(query, key, value, [1200], None, window)
    short = [x.float() for x in (query, key, value)]
    usual = attend_to_the_past(*(x[None] for x in short), window, scale=None)[0]
    bound = (usual - truth).abs().max()
    for rank in range(2):
        row = packed_row((1200,), CPU, group(2, rank))
        own = row.share.own_S
        output = chunks_by_runs(short[0][own], *short[1:], row, scale=None, window=window)
        assert 0 < (output - truth[own]).abs().max() <= 2 * bound
