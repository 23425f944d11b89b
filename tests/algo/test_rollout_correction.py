"""Weights from rollout to trainer against values worked out by hand. T response tokens end to end."""

import math

import pytest
import torch

from megarlhf.algo.rollout_correction import rollout_correction
from megarlhf.algo.segments import Segments
from tests.refuses import refuses

RESPONSES = Segments.of(torch.tensor([3, 1]))
RATIOS_T = torch.tensor([4.0, 0.25, 1.5, 0.4], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "level", "weights", "cut"),
    [
        ("truncate", "token", [2.0, 0.25, 1.5, 0.4], [True, False, False, False]),
        ("mask", "token", [0.0, 0.0, 1.5, 0.0], [True, True, False, True]),
        ("truncate", "sequence", [1.5, 1.5, 1.5, 0.4], [False] * 4),
        ("mask", "sequence", [1.5, 1.5, 1.5, 0.0], [False, False, False, True]),
        ("truncate", "geometric", [1.5 ** (1 / 3)] * 3 + [0.4], [False] * 4),
    ],
)
def test_by_hand(kind, level, weights, cut):
    """Bounds .5 and 2. The first response's ratios multiply to 1.5."""
    rollout_T = torch.full((4,), -1.0, dtype=torch.float64)
    found = rollout_correction(
        rollout_T + RATIOS_T.log(), rollout_T, RESPONSES, kind=kind, level=level, low=0.5, high=2.0
    )
    assert found.weights_T.tolist() == pytest.approx(weights)
    assert found.cut_T.tolist() == cut


def test_a_response_that_is_kept_as_a_whole_has_weights_of_its_tokens():
    """Geometric means 1.5 ** (1 / 3) and .4: the second one is outside."""
    rollout_T = torch.full((4,), -1.0, dtype=torch.float64)
    bounds = {"kind": "mask", "level": "geometric", "low": 0.5, "high": 2.0, "mask_weight": "token"}
    found = rollout_correction(rollout_T + RATIOS_T.log(), rollout_T, RESPONSES, **bounds)
    assert found.weights_T.tolist() == pytest.approx([4.0, 0.25, 1.5, 0.0])
    assert found.cut_T.tolist() == [False, False, False, True]


def test_equal_numerics_change_nothing():
    logprobs_T = torch.randn(4)
    for kind in ("truncate", "mask"):
        for level in ("token", "sequence", "geometric"):
            found = rollout_correction(logprobs_T, logprobs_T, RESPONSES, kind=kind, level=level, low=0.5, high=2.0)
            assert found.weights_T.tolist() == [1.0] * 4
            assert not found.cut_T.any()


def test_it_makes_the_rollout_s_samples_the_trainer_s():
    """Of a coin that the rollout throws at .6 and the trainer at .5: the mean of weight x value is the trainer's."""
    rollout, trainer = torch.tensor([0.6, 0.4]).double().log(), torch.tensor([0.5, 0.5]).double().log()
    one_each = Segments.of(torch.tensor([1, 1]))
    found = rollout_correction(trainer, rollout, one_each, kind="truncate", level="token", low=0.5, high=2.0)
    value_T = torch.tensor([3.0, -1.0]).double()
    assert float((rollout.exp() * found.weights_T * value_T).sum()) == pytest.approx(1.0)


def test_an_unknown_kind():
    with refuses("'cap'", "truncate, mask"):
        rollout_correction(RATIOS_T, RATIOS_T, RESPONSES, kind="cap", level="token", low=math.nan, high=2.0)
