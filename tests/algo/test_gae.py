"""The specification of GAE, returns and whitening by hand. That the kernels compute the same: tests/kernels."""

import math

import pytest
import torch

from megarlhf.algo.gae import gae, kl_shaped_rewards
from megarlhf.algo.whitening import group_moments, moments, whiten

NAN = math.nan


def test_gae_by_hand_and_sequences_do_not_mix():
    """gamma=.5, lam=.5. d1 = 4-2 = 2, d0 = .5*2-1 = 0, A0 = .25*2 = .5; the second: one token, 3-1; the third NaN."""
    rewards_T, values_T = torch.tensor([0.0, 4.0, 3.0, 1.0]), torch.tensor([1.0, 2.0, 1.0, NAN])
    advantages_T, returns_T = gae(rewards_T, values_T, torch.tensor([0, 2, 3, 4]), gamma=0.5, lam=0.5)
    assert advantages_T[:3].tolist() == [0.5, 2.0, 2.0]
    assert returns_T[:3].tolist() == [1.5, 4.0, 3.0]
    assert advantages_T[3:].isnan().all()


@pytest.mark.parametrize("kind, kl", [("k1", 0.5), ("k2", 0.125), ("k3", math.expm1(-0.5) + 0.5)])
def test_shaped_rewards_by_hand(kind, kl):
    """log r = -.5 at every token; the second sequence has no token, and its score goes nowhere."""
    logprobs_T = torch.full((3,), -1.0, dtype=torch.float64)
    options = {"kl_coef": 0.1, "kl_kind": kind}
    scores_N, cu_seqlens = torch.tensor([1.0, 5.0, -2.0], dtype=torch.float64), torch.tensor([0, 2, 2, 3])
    rewards_T = kl_shaped_rewards(logprobs_T, logprobs_T - 0.5, scores_N, cu_seqlens, **options)
    expected_T = torch.tensor([-0.1 * kl, 1 - 0.1 * kl, -2 - 0.1 * kl], dtype=torch.float64)
    torch.testing.assert_close(rewards_T, expected_T)
    assert kl_shaped_rewards(logprobs_T, None, scores_N, cu_seqlens, **options).tolist() == [0.0, 1.0, -2.0]


def test_moments_and_whitening_by_hand():
    """Sequence 0 is 1 and 3 (mean 2, variance 1), sequence 1 is 5; 7 is masked. Sequences 0 and 1 form one group."""
    x_T, mask_T = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([True, True, True, False])
    cu_seqlens = torch.tensor([0, 2, 4])
    moments_N3 = moments(x_T, mask_T, cu_seqlens)
    assert moments_N3.tolist() == [[4.0, 10.0, 2.0], [5.0, 25.0, 1.0]]
    assert group_moments(moments_N3, torch.tensor([9, 9])).tolist() == [[9.0, 35.0, 3.0]] * 2
    mean_N, scale_N = torch.tensor([2.0, 5.0]).double(), torch.tensor([1.0, 10.0]).double()
    assert whiten(x_T, mask_T, cu_seqlens, mean_N, scale_N).tolist() == [-1.0, 1.0, 0.0, 0.0]
    shifted_T = whiten(x_T, mask_T, cu_seqlens, mean_N, scale_N, shift_mean=False)
    assert shifted_T.tolist() == [1.0, 3.0, 5.0, 0.0]
