"""Advantages against values worked out by hand. Axes: B responses, T positions, N samples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarlhf.algo.advantages import (
    Moments,
    broadcast_to_tokens,
    gae,
    group_relative,
    leave_one_out,
    masked_moments,
    shaped_rewards,
    whiten,
)

NAN = math.nan


def test_gae_by_hand_and_padding_ignored():
    """gamma=1, lambda=.5: A2 = 1-.5 = .5, A1 = .25, A0 = .125. Not covered: context-parallel splits."""
    rewards_BT = torch.tensor([[0.0, 0.0, 1.0, 7.0]])
    values_BT = torch.tensor([[0.5, 0.5, 0.5, -9.0]])
    mask_BT = torch.tensor([[True, True, True, False]])
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=0.5)
    torch.testing.assert_close(advantages_BT, torch.tensor([[0.125, 0.25, 0.5, 0.0]]))
    torch.testing.assert_close(returns_BT, torch.tensor([[0.625, 0.75, 1.0, 0.0]]))


def test_gae_discounts_and_rows_do_not_mix():
    """gamma=.5, lam=.5. Row 0: d1 = 4-2 = 2, d0 = 1+.5*2-1 = 1, A0 = 1+.25*2 = 1.5. Row 1: one token, 3-1."""
    rewards_BT = torch.tensor([[1.0, 4.0], [3.0, NAN]])
    values_BT = torch.tensor([[1.0, 2.0], [1.0, NAN]])
    mask_BT = torch.tensor([[True, True], [True, False]])
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages_BT, torch.tensor([[1.5, 2.0], [2.0, 0.0]]))
    torch.testing.assert_close(returns_BT, torch.tensor([[2.5, 4.0], [3.0, 0.0]]))


def test_gae_gives_no_gradient_and_takes_empty_input():
    values_BT = torch.ones(2, 3, requires_grad=True)
    advantages_BT, returns_BT = gae(torch.ones(2, 3), values_BT, torch.ones(2, 3).bool(), gamma=1.0, lam=1.0)
    assert not advantages_BT.requires_grad
    assert not returns_BT.requires_grad
    empty_BT = torch.zeros(2, 0)
    assert gae(empty_BT, empty_BT, empty_BT.bool(), gamma=1.0, lam=1.0)[0].shape == (2, 0)


def _gae_by_definition(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lam)^l d_{t+l}, a sum for each t: O(T^2)."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]


FLOATS = st.floats(-10, 10)
ROWS = st.lists(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=9), min_size=1, max_size=4)


@given(ROWS, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_definition(rows, gamma, lam):
    """Ragged rows of any length, NaN on padding, fp64."""
    num_positions = max(map(len, rows))
    rewards_BT, values_BT = torch.full((2, len(rows), num_positions), NAN, dtype=torch.float64)
    mask_BT = torch.zeros(len(rows), num_positions, dtype=torch.bool)
    expected_BT = torch.zeros(len(rows), num_positions, dtype=torch.float64)
    for b, row in enumerate(rows):
        rewards, values = zip(*row, strict=True)
        rewards_BT[b, : len(row)] = torch.tensor(rewards, dtype=torch.float64)
        values_BT[b, : len(row)] = torch.tensor(values, dtype=torch.float64)
        mask_BT[b, : len(row)] = True
        expected = _gae_by_definition(rewards, values, gamma, lam)
        expected_BT[b, : len(row)] = torch.tensor(expected, dtype=torch.float64)
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages_BT, expected_BT, atol=1e-10, rtol=1e-10)
    expected_returns_BT = torch.where(mask_BT, advantages_BT + values_BT, 0.0)
    torch.testing.assert_close(returns_BT, expected_returns_BT)


def test_shaped_rewards_by_hand():
    """Score on the last response token of each row; the third row has none and loses its score."""
    scores_N = torch.tensor([1.0, -2.0, 5.0])
    kl_BT = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, -9.0], [7.0, 7.0, 7.0]])
    mask_BT = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    rewards_BT = shaped_rewards(scores_N, kl_BT, mask_BT, kl_coef=0.1)
    expected_BT = torch.tensor([[-0.1, -0.2, 0.7], [-2.4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards_BT, expected_BT)


GROUPS_N = torch.tensor([7, 3, 7, 9, 7, 3])
REWARDS_N = torch.tensor([1.0, 10.0, 2.0, 4.0, 3.0, 30.0])


def test_group_relative_by_hand():
    """Group 7: 1, 2, 3 (mean 2, unbiased std 1). Group 3: 10, 30 (mean 20, std sqrt(200)). Group 9: alone."""
    advantages_N = group_relative(REWARDS_N, GROUPS_N, eps=0.0)
    root = math.sqrt(0.5)
    torch.testing.assert_close(advantages_N[[0, 1, 2, 4, 5]], torch.tensor([-1.0, -root, 0.0, 1.0, root]))
    assert group_relative(REWARDS_N, GROUPS_N)[3] == 0
    plain_N = group_relative(REWARDS_N, GROUPS_N, scale_by_std=False)
    torch.testing.assert_close(plain_N, torch.tensor([-1.0, -10.0, 0.0, 0.0, 1.0, 10.0]))


def test_group_relative_of_equal_rewards_is_zero():
    """0.1 has no exact mean in fp32: noise over eps must not become an advantage."""
    rewards_N = torch.full((7,), 0.1)
    advantages_N = group_relative(rewards_N, torch.zeros(7, dtype=torch.long))
    assert advantages_N.abs().max() < 1e-9


def test_leave_one_out_by_hand():
    """Group 7: 1-2.5, 2-2, 3-1.5. Group 3: 10-30, 30-10. Group 9: no baseline."""
    advantages_N = leave_one_out(REWARDS_N, GROUPS_N)
    torch.testing.assert_close(advantages_N, torch.tensor([-1.5, -20.0, 0.0, 0.0, 1.5, 20.0]))


def test_broadcast_to_tokens():
    mask_BT = torch.tensor([[True, True], [True, False]])
    expected_BT = torch.tensor([[2.0, 2.0], [-3.0, 0.0]])
    torch.testing.assert_close(broadcast_to_tokens(torch.tensor([2.0, -3.0]), mask_BT), expected_BT)


X_BT = torch.tensor([[1.0, 3.0, NAN], [5.0, 7.0, -9.0]])
X_MASK_BT = torch.tensor([[True, True, False], [True, True, False]])


def test_whiten_by_hand():
    """1, 3, 5, 7: mean 4, biased variance (9+1+1+9)/4 = 5."""
    root = math.sqrt(5.0)
    expected_BT = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 3.0, 0.0]]) / root
    torch.testing.assert_close(whiten(X_BT, X_MASK_BT, eps=0.0), expected_BT)
    unshifted_BT = whiten(X_BT, X_MASK_BT, eps=0.0, shift_mean=False)
    torch.testing.assert_close(unshifted_BT, torch.where(X_MASK_BT, expected_BT + 4, 0.0))
    assert whiten(X_BT, torch.zeros_like(X_MASK_BT)).abs().sum() == 0


def test_moments_add_up_over_ranks():
    """Two ranks whiten with the sum of their moments as one rank does with all rows."""
    moments = masked_moments(X_BT, X_MASK_BT)
    assert [float(m) for m in moments] == [16.0, 84.0, 4.0]
    assert (float(moments.mean()), float(moments.variance())) == (4.0, 5.0)
    parts = [masked_moments(X_BT[b : b + 1], X_MASK_BT[b : b + 1]) for b in range(2)]
    summed = Moments(*(a + b for a, b in zip(*parts, strict=True)))
    for b in range(2):
        row_BT = whiten(X_BT[b : b + 1], X_MASK_BT[b : b + 1], moments=summed)
        torch.testing.assert_close(row_BT, whiten(X_BT, X_MASK_BT)[b : b + 1])
    assert not torch.allclose(whiten(X_BT[:1], X_MASK_BT[:1]), whiten(X_BT, X_MASK_BT)[:1])


def test_moments_survive_a_large_mean():
    """1e4 +- 1e-2 in fp32 would leave no variance at all."""
    x_BT = torch.tensor([[1e4, 1e4 + 0.0625]])
    variance = masked_moments(x_BT, torch.ones(1, 2).bool()).variance()
    assert float(variance) == pytest.approx(0.0625**2 / 4, rel=1e-3)
