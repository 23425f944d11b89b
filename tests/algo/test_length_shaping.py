"""Rewards for a response's length, by hand."""

import pytest
import torch

from megarlhf.algo.length_shaping import missing_end_penalty, overlong_penalty
from tests.refuses import refuses


def test_the_penalty_falls_in_a_straight_line_over_the_buffer():
    """Of at most 20 tokens the last 8: nothing up to 12, half the penalty at 16, all of it at 20."""
    lengths_N = torch.tensor([1, 12, 13, 16, 20])
    expected = [0.0, 0.0, -0.25, -1.0, -2.0]
    assert overlong_penalty(lengths_N, longest=20, buffer=8, penalty=2.0).tolist() == expected


def test_a_buffer_may_be_all_of_the_length():
    assert overlong_penalty(torch.tensor([0, 5, 10]), longest=10, buffer=10, penalty=1.0).tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_that_is_none_is_refused(buffer):
    with refuses(f"buffer = {buffer}", "1 to 20"):
        overlong_penalty(torch.tensor([1]), longest=20, buffer=buffer, penalty=1.0)


def test_a_missing_end_costs_its_penalty():
    assert missing_end_penalty(torch.tensor([True, False]), penalty=0.5).tolist() == [0.0, -0.5]
