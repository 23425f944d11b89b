"""The stated routing of a mixture of experts. What real and rehearsed routers make of it: `test_truth.py`."""

import pytest
import torch

from megarlhf.rehearsal.fake_device.routing import Routing
from tests.refuses import refuses


def test_balanced_experts_are_dealt_out_one_after_the_other() -> None:
    assert Routing().experts_of(4, 3, 2).tolist() == [[0, 1], [2, 0], [1, 2], [0, 1]]


@pytest.mark.parametrize(("skew", "busiest"), [(1.0, 250), (1.5, 375), (2.0, 500), (4.0, 1000)])
def test_the_busiest_expert_gets_its_factor_and_the_others_share_the_rest(skew, busiest) -> None:
    """1000 tokens, 2 of 8 experts: 250 is the mean. Every token goes to two different experts."""
    experts = Routing(skew=skew).experts_of(1000, 8, 2)
    assert all(len(set(row)) == 2 for row in experts.tolist())
    first, *others = torch.bincount(experts.flatten(), minlength=8).tolist()
    assert first == busiest
    assert sum(others) == 2000 - busiest
    assert max(others) - min(others) <= 1


def test_busy_tokens_are_spread_over_the_row() -> None:
    """Half of the tokens go to expert 0: one of two neighbours each."""
    experts = Routing(skew=2.0).experts_of(100, 8, 2)
    to_first = (experts == 0).any(1).long()
    assert to_first.view(50, 2).sum(1).tolist() == [1] * 50


def test_all_experts_or_no_token() -> None:
    assert Routing(skew=1.0).experts_of(0, 8, 2).shape == (0, 2)
    assert Routing(skew=3.0).experts_of(0, 8, 2).shape == (0, 2)
    assert Routing(skew=3.0).experts_of(2, 2, 2).tolist() == [[0, 1], [0, 1]]


def test_a_skew_that_cannot_be_is_refused() -> None:
    with refuses("routing skew", "mean", "1"):
        Routing(skew=0.5)
    with refuses("routing skew", "4 times"):
        Routing(skew=4.5).experts_of(10, 8, 2)
