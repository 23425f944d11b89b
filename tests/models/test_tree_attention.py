"""Attention over rows whose segments continue others: each sequence as if it stood alone.

Not covered: the calls of varlen_attn's kernels, which test_tree_varlen.py has; that the work is counted as it is done
(tests/rehearsal/test_meter.py).
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarlhf.kernels.backends import log_once
from megarlhf.models.attention import tree as module
from megarlhf.models.attention.layers import with_packed_rows
from megarlhf.models.attention.packed import packed_attention
from megarlhf.models.attention.tree import CpuFlash, Varlen, kernel_for, merged_attention, plain_attention
from megarlhf.parallel.packing.rows import packed_row
from tests.models.test_packed_attention import with_gradients
from tests.models.trees import CPU, ROWS, alone, close, inputs
from tests.refuses import refuses

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
        "attention over rows of trees: plain (a sliding window sees only a part of what comes before)",
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
    "parents, names",
    [
        ((-1, -1, 0, 1, 0), ("segment 4", "level 1, parent 0", "segment 3", "level 1, parent 1")),
        ((-1, 0, 1, 0), ("segment 3", "level 1, parent 0", "segment 2", "level 2, parent 1")),
        ((-1, 0, -1, 0), ("root", "segments 1 and 3")),
        ((-1, 2, 0), ("segment 1 continues 2", "before")),
    ],
)
def test_a_row_in_another_order_is_refused(parents, names):
    with refuses(*names, error=AssertionError):
        _ = packed_row([3] * len(parents), CPU, parents=parents).trees


@pytest.mark.parametrize("turned", [True, False])
def test_a_part_of_a_projection_does_not_keep_all_of_it(turned) -> None:
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
