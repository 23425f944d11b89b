"""Advantages and returns of packed sequences: by hand, against fp64; and of all packed functions: nothing, twice.

Not covered: context-parallel splits of a sequence, GPUs (the marker `gpu`; benchmarks.gpu_packed --check).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.kernels import packed_gae, packed_moments, packed_sums, packed_whiten
from tests.kernels.cases import INTERPRETING
from tests.kernels.packed_cases import (
    BACKENDS,
    LENGTHS,
    OURS,
    RAGGED,
    assert_no_worse,
    called,
    columns,
    cu_seqlens_of,
    gae_of,
    magnitude,
    tensor,
)
from tests.operators import Operators

NAN = math.nan
KINDS = ("k1", "k2", "k3", "abs")
PLAIN = {"gamma": 1.0, "lam": 0.5, "kl_coef": 0.0}
several = pytest.mark.parametrize("backend", BACKENDS)
sometimes = settings(max_examples=15 if INTERPRETING else 40, deadline=None, derandomize=True)


# --- GAE ------------------------------------------------------------------------------------------


@several
def test_gae_by_hand(backend):
    """gamma=1, lambda=.5, score 1: A2 = 1-.5 = .5, A1 = .25, A0 = .125."""
    values_T = tensor(0.5, 0.5, 0.5)
    advantages_T, returns_T = gae_of(backend, values_T, None, values_T, tensor(1.0), tensor(0, 3), **PLAIN)
    assert advantages_T.tolist() == [0.125, 0.25, 0.5]
    assert returns_T.tolist() == [0.625, 0.75, 1.0]


@several
def test_gae_discounts_and_sequences_do_not_mix(backend):
    """gamma=.5, lam=.5. d1 = 4-2 = 2, d0 = .5*2-1 = 0, A0 = .25*2 = .5; the second: one token, 3-1; the third NaN."""
    values_T = tensor(1.0, 2.0, 1.0, NAN)
    options = {"gamma": 0.5, "lam": 0.5, "kl_coef": 0.0}
    advantages_T, returns_T = gae_of(
        backend, values_T, None, values_T, tensor(4.0, 3.0, 1.0), tensor(0, 2, 3, 4), **options
    )
    assert advantages_T[:3].tolist() == [0.5, 2.0, 2.0]
    assert returns_T[:3].tolist() == [1.5, 4.0, 3.0]
    assert advantages_T[3:].isnan().all()


@several
def test_shaped_rewards_by_hand(backend):
    """Without values and discount, returns are what is still to come. kl 1, 2, 3 and 4 at .1, scores 1 and -2.

    Rewards -.1, -.2, .7 and -2.4; the sequence between has no token and loses its score of 5.
    """
    ref_T = -tensor(1.0, 2.0, 3.0, 4.0)
    zeros_T = torch.zeros(4)
    scores_N = tensor(1.0, 5.0, -2.0)
    options = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.1}
    advantages_T, _ = gae_of(backend, zeros_T, ref_T, zeros_T, scores_N, tensor(0, 3, 3, 4), **options)
    torch.testing.assert_close(advantages_T, tensor(0.4, 0.5, 0.7, -2.4))


@several
@pytest.mark.parametrize("kind, expected", [("k1", 0.5), ("k2", 0.125), ("k3", math.expm1(-0.5) + 0.5), ("abs", 0.5)])
def test_kl_estimators_by_hand(backend, kind, expected):
    """log r = -.5: .5, .125, e^-.5 - 1 + .5, .5."""
    advantage_T, _ = gae_of(backend, tensor(-1.0), tensor(-1.5), tensor(0.0), tensor(0.0), tensor(0, 1), gamma=1.0,
                            lam=1.0, kl_coef=1.0, kl_kind=kind)  # fmt: skip
    assert float(advantage_T) == pytest.approx(-expected, rel=1e-6)


@several
def test_rewards_of_tokens_by_hand(backend):
    """Beside the scores 1 and -2, and in place of a KL: returns are what is still to come."""
    zeros_T, token_rewards_T = torch.zeros(4), tensor(0.5, -0.25, 0.0, 4.0)
    advantages_T, _ = gae_of(
        backend, zeros_T, None, zeros_T, tensor(1.0, 5.0, -2.0), tensor(0, 3, 3, 4), gamma=1.0, lam=1.0, kl_coef=0.0,
        token_rewards_T=token_rewards_T,
    )  # fmt: skip
    assert advantages_T.tolist() == [1.25, 0.75, 1.0, 2.0]


@several
@pytest.mark.parametrize("log_ratio", [1e-4, -1e-3, 0.3, -0.999, 0.999, 1.0, -1.001, 4.0, -20.0])
def test_k3_where_its_terms_cancel(backend, log_ratio):
    """Against fp64: at least as good as fp32's expm1(x) - x."""
    x_T = tensor(log_ratio)
    true = float(torch.expm1(x_T.double()) - x_T.double())
    usual = float(torch.expm1(x_T) - x_T)
    zero_T = torch.zeros(1)
    advantage_T, _ = gae_of(backend, zero_T, x_T, zero_T, zero_T, tensor(0, 1), gamma=1.0, lam=1.0, kl_coef=1.0,
                      kl_kind="k3")  # fmt: skip
    assert abs(-float(advantage_T) - true) <= 2 * max(abs(usual - true), 2e-7 * true)


@several
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_gae_is_no_worse_than_the_loop(backend, lengths, kind):
    options = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1 if kind else 0.0, "kl_kind": kind or "k1"}
    inputs = columns(lengths)
    inputs = (inputs[0], inputs[1] if kind else None, *inputs[2:])
    wide = [column if column is None else column.double() for column in inputs]
    truth = packed_gae(*wide, cu_seqlens_of(lengths), backend="torch", **options)
    assert all(output.dtype == torch.float64 for output in truth)
    loop = packed_gae(*inputs, cu_seqlens_of(lengths), backend="reference", **options)
    outputs = gae_of(backend, *inputs, cu_seqlens_of(lengths, torch.int32), **options)
    assert_no_worse(outputs, loop, truth)
    assert sum(lengths) == 0 or torch.count_nonzero(outputs[0]) > 0


def gae_by_definition(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lam)^l d_{t+l}, a sum for each t: O(T^2)."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]


FLOATS = st.floats(-10, 10)
ROWS = st.lists(st.lists(st.tuples(FLOATS, FLOATS), max_size=9), max_size=5)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@sometimes
@given(ROWS, FLOATS, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_definition(backend, rows, score, gamma, lam):
    """Ragged rows of any length, 0 too, and of any number, in fp64. Each token's KL (k1) is its reward, negated."""
    if INTERPRETING:
        pytest.skip("fp64 is not Triton's")
    flat = [pair for row in rows for pair in row]
    rewards_T, values_T = torch.tensor(flat, dtype=torch.float64).reshape(-1, 2).unbind(1)
    expected, returned = [], []
    for row in rows:
        rewards, values = zip(*row, strict=True) if row else ((), ())
        if row:
            rewards = (*rewards[:-1], rewards[-1] + score)
        advantages = gae_by_definition(rewards, values, gamma, lam)
        expected += advantages
        returned += [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    scores_N = torch.full((len(rows),), score, dtype=torch.float64)
    cu_seqlens = cu_seqlens_of([len(row) for row in rows])
    advantages_T, returns_T = packed_gae(
        torch.zeros_like(rewards_T), rewards_T, values_T, scores_N, cu_seqlens, gamma=gamma, lam=lam, kl_coef=1.0,
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(advantages_T, torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(returns_T, torch.tensor(returned, dtype=torch.float64), atol=1e-10, rtol=1e-10)


FACTORS = st.sampled_from([0.0, 0.5, 0.99, 1.0])


@pytest.mark.parametrize("backend", OURS)
@sometimes
@given(RAGGED, FACTORS, FACTORS, st.sampled_from(KINDS), st.integers(0, 99))
def test_gae_of_any_lengths(backend, lengths, gamma, lam, kind, seed):
    options = {"gamma": gamma, "lam": lam, "kl_coef": 0.2, "kl_kind": kind}
    inputs = columns(lengths, seed)
    truth = packed_gae(*(column.double() for column in inputs), cu_seqlens_of(lengths), backend="reference", **options)
    loop = packed_gae(*inputs, cu_seqlens_of(lengths), backend="reference", **options)
    # In small problems the loop may happen to be exact: half a unit in the last place of what may have cancelled.
    least = 2**-24 * magnitude(truth[0], lengths, gamma * lam)
    assert_no_worse(gae_of(backend, *inputs, cu_seqlens_of(lengths), **options), loop, truth, least)


@several
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(backend, dtype):
    """The same bits as of the same numbers in fp32: nothing on the way is rounded to half precision."""
    lengths = [140, 3]
    options = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1}
    inputs = columns(lengths, dtype=dtype)
    outputs = gae_of(backend, *inputs, cu_seqlens_of(lengths), **options)
    wide = gae_of(backend, *(column.float() for column in inputs), cu_seqlens_of(lengths), **options)
    assert all(torch.equal(output, other) for output, other in zip(outputs, wide, strict=True))
    assert outputs[0].dtype == torch.float32


@several
def test_gae_gives_no_gradient_and_does_not_read_what_it_does_not_need(backend):
    """With kl_coef 0 neither log-prob counts, whatever stands there."""
    values_T = torch.ones(3, requires_grad=True)
    nothing_T = torch.full((3,), NAN)
    outputs = gae_of(backend, nothing_T, nothing_T, values_T, tensor(1.0), tensor(0, 3), **PLAIN)
    assert not any(output.requires_grad for output in outputs)
    assert outputs[0].isfinite().all()


@several
def test_a_nan_reaches_only_the_tokens_before_it(backend):
    """Token 200 of the first sequence; the value's neighbour before it also has it in its difference."""
    lengths = [300, 20]
    logprobs_T, ref_T, values_T, scores_N = columns(lengths)
    options = {"gamma": 0.9, "lam": 0.9, "kl_coef": 0.1}
    clean = gae_of(backend, logprobs_T, ref_T, values_T, scores_N, cu_seqlens_of(lengths), **options)
    ref_T[200] = NAN
    tainted = gae_of(backend, logprobs_T, ref_T, values_T, scores_N, cu_seqlens_of(lengths), **options)
    for output, other in zip(tainted, clean, strict=True):
        assert output[:201].isnan().all()
        assert torch.equal(output[201:], other[201:])


@several
def test_columns_that_are_views(backend):
    """Every second number of a longer row, and one row of several."""
    inputs = columns([140, 3])
    options = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1}
    plain = gae_of(backend, *inputs, cu_seqlens_of([140, 3]), **options)
    views = [torch.stack([column, column.neg()], 1)[:, 0] for column in inputs]
    assert not any(column.is_contiguous() for column in views)
    outputs = gae_of(backend, *views, torch.stack([cu_seqlens_of([140, 3])] * 2, 1)[:, 0], **options)
    assert all(torch.equal(output, other) for output, other in zip(outputs, plain, strict=True))


# --- nothing, twice, and dtypes -------------------------------------------------------------------


@several
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=["no sequence", "an empty one", "three empty ones"])
def test_a_rank_without_tokens(backend, lengths):
    """Also one without a sequence."""
    none_T, cu_seqlens = torch.zeros(0), cu_seqlens_of(lengths)
    options = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.1}
    outputs = gae_of(backend, none_T, none_T, none_T, torch.ones(len(lengths)), cu_seqlens, **options)
    assert [output.shape for output in outputs] == [(0,), (0,)]
    groups_N = torch.zeros(len(lengths), dtype=torch.int32)
    for groups in (None, groups_N):
        assert called(packed_sums, backend, none_T, cu_seqlens, groups_N=groups).tolist() == [0.0] * len(lengths)
        means_N = called(packed_moments, backend, none_T, cu_seqlens, groups_N=groups).mean()
        assert means_N.tolist() == [0.0] * len(lengths)
        assert called(packed_whiten, backend, none_T, cu_seqlens=cu_seqlens, groups_N=groups).shape == (0,)
    assert called(packed_whiten, backend, none_T, none_T.bool()).shape == (0,)
    assert [float(moment) for moment in called(packed_moments, backend, none_T)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", OURS)
def test_runs_repeat_bit_for_bit(backend):
    """Also where a group's sequences stand in another order of others."""
    lengths = [300, 1, 129, 0, 128, 127]
    inputs = columns(lengths, seed=3)
    groups_N = tensor(2, 1, 2, 1, 0, 2)
    options = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1}

    def results():
        x_T = inputs[2]
        outputs = [*gae_of(backend, *inputs, cu_seqlens_of(lengths), **options)]
        outputs += called(packed_moments, backend, x_T, cu_seqlens_of(lengths), groups_N=groups_N)
        outputs.append(called(packed_whiten, backend, x_T, cu_seqlens=cu_seqlens_of(lengths), groups_N=groups_N))
        return [*outputs, called(packed_whiten, backend, x_T)]

    first = results()
    for _ in range(2):
        for output, other in zip(results(), first, strict=True):
            assert torch.equal(output, other)
    assert all(torch.count_nonzero(output) > 0 for output in first)


@pytest.mark.skipif(INTERPRETING, reason="Triton's kernels have no atomics")
def test_nothing_is_added_by_index():
    """On a GPU torch does that with atomics, in an order that changes from run to run."""
    inputs, cu_seqlens, groups_N = columns([5, 0, 9]), cu_seqlens_of([5, 0, 9]), tensor(1, 0, 1)
    with Operators() as noted:
        packed_gae(*inputs, cu_seqlens, gamma=0.9, lam=0.9, kl_coef=0.1, backend="torch")
        packed_whiten(inputs[2], inputs[2] > 0, cu_seqlens=cu_seqlens, groups_N=groups_N, backend="torch")
    assert {"segment_reduce", "repeat_interleave", "index_copy_"} <= noted.names
    adding = ("index_add", "scatter", "put", "bincount", "histc", "embedding", "reduce_")
    assert not [name for name in noted.names for part in adding if part in name]


@pytest.mark.parametrize("backend", OURS)
def test_a_sequence_has_the_same_bits_whatever_stands_beside_it(backend):
    """Alone, behind others and before others. Not: with a longer one in the batch, which may widen the blocks."""
    lengths = [300, 1, 129, 0, 128, 127]
    inputs = columns(lengths, seed=5)
    options = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1}
    whole = gae_of(backend, *inputs, cu_seqlens_of(lengths), **options)
    first = [column[:300] if len(column) > 6 else column[:1] for column in inputs]
    alone = gae_of(backend, *first, cu_seqlens_of(lengths[:1]), **options)
    assert all(torch.equal(output, other[:300]) for output, other in zip(alone, whole, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="fp64 is not Triton's")
def test_fp64_stays_fp64():
    lengths = [40, 3]
    wide = [column.double() for column in columns(lengths)]
    cu_seqlens = cu_seqlens_of(lengths)
    for backend in ("auto", "torch", "reference"):
        outputs = [*packed_gae(*wide, cu_seqlens, gamma=0.9, lam=0.9, kl_coef=0.1, backend=backend)]
        outputs += [packed_sums(wide[2], cu_seqlens, backend=backend), packed_whiten(wide[2], backend=backend)]
        assert all(output.dtype == torch.float64 for output in outputs)
    narrow = packed_gae(*columns(lengths), cu_seqlens, gamma=0.9, lam=0.9, kl_coef=0.1)
    assert 0 < float((narrow[0].double() - outputs[0]).abs().max()) < 1e-5
