"""Rewards added up, by hand. Normalisation: tests/trainers/test_rewards.py."""

import math

import torch

from megarlhf.algo.reward_scaling import weighted_total

NAN = math.nan


def test_the_weighted_sum_by_hand():
    """1 x 2 - 3 x .5; what does not apply adds nothing; NaN where nothing applies, and where something has failed."""
    values_KN = torch.tensor([[2.0, NAN, NAN, NAN, 4.0], [0.5, 0.5, NAN, 0.5, 0.5]])
    failed_KN = torch.tensor([[False, False, False, True, False], [False] * 5])
    assert weighted_total(values_KN, [1.0, -3.0])[[0, 1, 3, 4]].tolist() == [0.5, -1.5, -1.5, 2.5]
    found = weighted_total(values_KN, [1.0, -3.0], failed_KN)
    assert found[[0, 1, 4]].tolist() == [0.5, -1.5, 2.5]
    assert found[2:4].isnan().all()


def test_sums_that_are_equal_on_paper_are_equal():
    """In fp32 .3 + .6 differs from .9, and a group's deviation would be of rounding."""
    values_KN = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    for weights in ([0.1, 0.2, 0.3], [0.3, 0.6, 0.9]):
        first, second = weighted_total(values_KN, weights).tolist()
        assert first == second


def test_no_sample():
    assert weighted_total(torch.zeros(2, 0), [1.0, 1.0]).tolist() == []
