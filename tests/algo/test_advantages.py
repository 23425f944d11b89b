"""Advantages against values worked out by hand. Axes: N samples. Per token: tests/kernels/test_packed.py.

Not covered: GPUs.
"""

import math

import pytest
import torch

from megarlhf.algo.advantages import group_relative, leave_one_out
from tests.operators import Operators

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


@pytest.mark.parametrize("function", [group_relative, leave_one_out])
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
