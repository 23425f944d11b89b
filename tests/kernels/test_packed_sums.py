"""Sums, means and whitening of packed sequences and of groups of them: by hand, and against exact sums.

Not covered: GPUs (the marker `gpu`; benchmarks.gpu_packed --check). Repeated runs: test_packed.py.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.kernels import Moments, packed_moments, packed_sums, packed_whiten
from tests.kernels.cases import INTERPRETING, device_of
from tests.kernels.packed_cases import BACKENDS, LENGTHS, RAGGED, called, columns, cu_seqlens_of, tensor

NAN = math.nan
several = pytest.mark.parametrize("backend", BACKENDS)
sometimes = settings(max_examples=15 if INTERPRETING else 40, deadline=None, derandomize=True)

# --- sums, means, moments -------------------------------------------------------------------------

X_T = tensor(1.0, 3.0, NAN, 5.0, 7.0, -9.0)
MASK_T = tensor(True, True, False, True, True, False)
CU = tensor(0, 3, 3, 6)


@several
def test_sums_and_means_by_hand(backend):
    """A masked NaN reaches nothing; a sequence without a token has the sum 0 and the mean 0."""
    assert called(packed_sums, backend, X_T, CU, MASK_T).tolist() == [4.0, 0.0, 12.0]
    assert called(packed_moments, backend, X_T, CU, MASK_T).mean().tolist() == [2.0, 0.0, 6.0]
    sums_N = called(packed_sums, backend, X_T, CU)
    assert sums_N[0].isnan()
    assert sums_N[1:].tolist() == [0.0, 3.0], "a NaN that counts stays in its sequence"
    assert called(packed_moments, backend, X_T, CU).mean()[2] == 1.0


@several
def test_sums_and_means_of_groups_by_hand(backend):
    """Group 7: 1 + 2 + 16; group -3: 4 + 8. A mean is over tokens: 19 / 3, 12 / 2; group 5 has no token."""
    x_T = tensor(1.0, 2.0, 4.0, 8.0, 16.0)
    cu_seqlens, groups_N = cu_seqlens_of([2, 1, 0, 1, 1]), tensor(7, -3, 5, -3, 7)
    assert called(packed_sums, backend, x_T, cu_seqlens, groups_N=groups_N).tolist() == [19, 12, 0, 12, 19]
    means_N = called(packed_moments, backend, x_T, cu_seqlens, groups_N=groups_N).mean().float()
    torch.testing.assert_close(means_N, tensor(19 / 3, 6.0, 0.0, 6.0, 19 / 3))
    mask_T = tensor(True, False, True, True, True)
    masked_N = called(packed_moments, backend, x_T, cu_seqlens, mask_T, groups_N=groups_N).mean()
    assert masked_N.tolist() == [8.5, 6, 0, 6, 8.5]


@several
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_nan_stays_in_its_group(backend, bad):
    """Whichever group comes first by number, or by place."""
    for groups in itertools.permutations([1, 2, 3]):
        x_T = tensor(bad, 2.0, 3.0, 4.0)
        sums = called(packed_sums, backend, x_T, cu_seqlens_of([1, 1, 1, 1]), groups_N=tensor(*groups, groups[2]))
        assert not sums[0].isfinite()
        assert sums[1:].tolist() == [2, 7, 7]


@several
@sometimes
@given(RAGGED, st.integers(0, 99), st.booleans(), st.booleans())
def test_moments_of_any_lengths(backend, lengths, seed, masked, grouped):
    """Against Python's exact sums."""
    generator = torch.Generator().manual_seed(seed)
    x_T = torch.randn(sum(lengths), generator=generator) * 100 + 7
    mask_T = torch.rand(sum(lengths), generator=generator) < 0.7 if masked else None
    groups_N = torch.randint(-2, 2, (len(lengths),), generator=generator) if grouped else None
    moments = called(packed_moments, backend, x_T, cu_seqlens_of(lengths), mask_T, groups_N=groups_N)
    expected = []
    for n in range(len(lengths)):
        rows = [m for m in range(len(lengths)) if m == n or (grouped and groups_N[m] == groups_N[n])]
        kept = [torch.arange(sum(lengths[:m]), sum(lengths[: m + 1])) for m in rows]
        kept = [float(x_T[t]) for row in kept for t in row.tolist() if mask_T is None or mask_T[t]]
        expected.append((math.fsum(kept), math.fsum(x * x for x in kept), len(kept)))
    expected_N3 = torch.tensor(expected, dtype=torch.float64).reshape(-1, 3)
    torch.testing.assert_close(torch.stack(moments, 1), expected_N3, rtol=1e-13, atol=1e-10)


@several
def test_moments_survive_a_large_mean(backend):
    """1e4 +- 1e-2 in fp32 would leave no variance at all."""
    variance = called(packed_moments, backend, tensor(1e4, 1e4 + 0.0625)).variance()
    assert variance.shape == ()
    assert float(variance) == pytest.approx(0.0625**2 / 4, rel=1e-3)


# --- whitening ------------------------------------------------------------------------------------


@several
def test_whiten_by_hand(backend):
    """1, 3, 5, 7: mean 4, biased variance (9+1+1+9)/4 = 5. NaN outside the mask becomes 0."""
    expected_T = tensor(-3.0, -1.0, 0.0, 1.0, 3.0, 0.0) / math.sqrt(5.0)
    torch.testing.assert_close(called(packed_whiten, backend, X_T, MASK_T, eps=0.0), expected_T)
    unshifted_T = called(packed_whiten, backend, X_T, MASK_T, eps=0.0, shift_mean=False)
    torch.testing.assert_close(unshifted_T, torch.where(MASK_T, expected_T + 4, 0.0))
    assert called(packed_whiten, backend, X_T, torch.zeros_like(MASK_T)).abs().sum() == 0


@several
def test_whiten_by_sequence_and_by_group(backend):
    """Each sequence: 1, 3 and 5, 7 have mean 2 and 6 and variance 1. Groups of both: as over everything."""
    by_sequence_T = called(packed_whiten, backend, X_T, MASK_T, cu_seqlens=CU, eps=0.0)
    assert by_sequence_T.tolist() == [-1, 1, 0, -1, 1, 0]
    whole_T = called(packed_whiten, backend, X_T, MASK_T)
    one_group_T = called(packed_whiten, backend, X_T, MASK_T, cu_seqlens=CU, groups_N=tensor(4, 4, 4))
    torch.testing.assert_close(one_group_T, whole_T)
    apart_T = called(packed_whiten, backend, X_T, MASK_T, cu_seqlens=CU, groups_N=tensor(4, 4, 9), eps=0.0)
    assert torch.equal(apart_T, by_sequence_T)


@several
def test_moments_add_up_over_ranks(backend):
    """Two ranks whiten with the sum of their moments as one rank does with all rows; a third has nothing."""
    moments = called(packed_moments, backend, X_T, None, MASK_T)
    assert [float(m) for m in moments] == [16.0, 84.0, 4.0]
    assert (float(moments.mean()), float(moments.variance())) == (4.0, 5.0)
    ranks = [(X_T[:3], MASK_T[:3]), (X_T[3:], MASK_T[3:]), (X_T[:0], MASK_T[:0])]
    parts = [packed_moments(x_T, None, mask_T, backend="reference") for x_T, mask_T in ranks]
    summed = Moments(*(sum(part).to(device_of(backend)) for part in zip(*parts, strict=True)))
    whole_T = called(packed_whiten, backend, X_T, MASK_T)
    for rank, part_T in enumerate((whole_T[:3], whole_T[3:], whole_T[:0])):
        whitened_T = called(packed_whiten, backend, *ranks[rank], moments=summed)
        torch.testing.assert_close(whitened_T, part_T)
    assert not torch.allclose(called(packed_whiten, backend, *ranks[0]), whole_T[:3])


@several
@pytest.mark.parametrize("lengths", LENGTHS)
def test_whitened_sequences_have_mean_0_and_variance_1(backend, lengths):
    x_T = columns(lengths)[2] * 3 + 50
    whitened_T = called(packed_whiten, backend, x_T, cu_seqlens=cu_seqlens_of(lengths))
    moments = packed_moments(whitened_T, cu_seqlens_of(lengths), backend="torch")
    several_N = torch.tensor(lengths) > 1
    torch.testing.assert_close(moments.mean(), torch.zeros(len(lengths)).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(moments.variance(), several_N.double(), atol=1e-5, rtol=0)
