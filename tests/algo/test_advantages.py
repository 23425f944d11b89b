"""Advantages against values worked out by hand. Axes: N samples. Per token: tests/kernels/test_packed.py.

Not covered: GPUs.
"""

import math

import pytest
import torch

from megarlhf.algo.advantages import group_centred, group_relative, leave_one_out, without_signal
from tests.operators import Operators

GROUPS_N = torch.tensor([7, 3, 7, 9, 7, 3])
REWARDS_N = torch.tensor([1.0, 10.0, 2.0, 4.0, 3.0, 30.0])


def test_group_relative_by_hand():
    """Group 7: 1, 2, 3 (mean 2, unbiased std 1). Group 3: 10, 30 (mean 20, std sqrt(200)). Group 9: alone."""
    advantages_N = group_relative(REWARDS_N, GROUPS_N, eps=0.0)
    root = math.sqrt(0.5)
    torch.testing.assert_close(advantages_N[[0, 1, 2, 4, 5]], torch.tensor([-1.0, -root, 0.0, 1.0, root]))
    assert group_relative(REWARDS_N, GROUPS_N)[3] == 0
    biased_N = group_relative(REWARDS_N, GROUPS_N, eps=0.0, unbiased=False)
    torch.testing.assert_close(biased_N[[0, 1]], torch.tensor([-math.sqrt(1.5), -1.0]))


def test_group_relative_with_eps_and_floor_by_hand():
    """Group 7 has a deviation of 1, group 3 one of sqrt(200): the floor of 4 holds for the first only."""
    eps_N = group_relative(REWARDS_N, GROUPS_N, eps=1.0)
    assert eps_N[0].item() == pytest.approx(-1 / 2)
    floored_N = group_relative(REWARDS_N, GROUPS_N, eps=0.0, floor=4.0)
    torch.testing.assert_close(floored_N[[0, 4, 5]], torch.tensor([-0.25, 0.25, math.sqrt(0.5)]))


def test_group_centred_by_hand():
    """Less the means 2, 20 and 4."""
    torch.testing.assert_close(group_centred(REWARDS_N, GROUPS_N), torch.tensor([-1.0, -10.0, 0.0, 0.0, 1.0, 10.0]))


@pytest.mark.parametrize("function", [group_relative, group_centred, leave_one_out])
def test_a_response_alone_gets_nothing_or_its_reward(function):
    assert function(REWARDS_N, GROUPS_N)[3] == 0
    kept_N = function(REWARDS_N, GROUPS_N, group_of_one="reward")
    assert kept_N[3] == 4.0
    others = GROUPS_N != 9
    assert torch.equal(kept_N[others], function(REWARDS_N, GROUPS_N)[others])


def test_groups_without_signal():
    """Those of equal rewards, and those of one; .1 has no exact mean."""
    rewards_N = torch.tensor([0.1, 1.0, 0.1, 4.0, 0.1, 1.5], dtype=torch.float64)
    assert without_signal(rewards_N, GROUPS_N).tolist() == [True, False, True, True, True, False]


def test_group_relative_of_equal_rewards_is_zero():
    """0.1 has no exact mean: noise over eps, or over nothing, must not become an advantage."""
    for dtype, eps in ((torch.float32, 1e-6), (torch.float64, 0.0)):
        rewards_N = torch.full((7,), 0.1, dtype=dtype)
        assert not group_relative(rewards_N, torch.zeros(7, dtype=torch.long), eps=eps).any()


def test_leave_one_out_by_hand():
    """Group 7: 1-2.5, 2-2, 3-1.5. Group 3: 10-30, 30-10. Group 9: no baseline."""
    advantages_N = leave_one_out(REWARDS_N, GROUPS_N)
    torch.testing.assert_close(advantages_N, torch.tensor([-1.5, -20.0, 0.0, 0.0, 1.5, 20.0]))


@pytest.mark.parametrize("function", [group_relative, group_centred, leave_one_out])
def test_no_sample_and_repeated_runs(function):
    """Of nothing nothing; the same bits twice; nothing adds by index, whose order on a GPU changes."""
    assert function(REWARDS_N[:0], GROUPS_N[:0]).shape == (0,)
    rewards_N, groups_N = torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.arange(500) % 7
    with Operators() as noted:
        first_N = function(rewards_N, groups_N)
    assert torch.equal(function(rewards_N, groups_N), first_N)
    assert "segment_reduce" in noted.names
    assert not [name for name in noted.names for part in ("index_add", "scatter", "put") if part in name]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_stays_in_its_group(bad):
    rewards_N = REWARDS_N.clone()
    rewards_N[0] = bad
    advantages_N = leave_one_out(rewards_N, GROUPS_N)
    assert not advantages_N[GROUPS_N == 7].isfinite().any()
    assert torch.equal(advantages_N[GROUPS_N != 7], leave_one_out(REWARDS_N, GROUPS_N)[GROUPS_N != 7])


def test_whole_numbers_and_truth_values_are_not_cut():
    """A reward function often returns an int or a bool; the result is that of the same numbers as fp32."""
    for rewards_N in (REWARDS_N.int(), REWARDS_N > 5):
        for advantage in (group_relative, leave_one_out, group_centred):
            torch.testing.assert_close(advantage(rewards_N, GROUPS_N), advantage(rewards_N.float(), GROUPS_N))
    with pytest.raises(ValueError, match=r"rewards of shape \[6\] and groups of shape \[3\]"):
        group_relative(REWARDS_N, GROUPS_N[:3])
