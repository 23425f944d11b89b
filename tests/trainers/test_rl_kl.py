"""The controller of the KL's coefficient, against values worked out by hand."""

import math

import pytest

from megarlhf.config import KLConfig
from megarlhf.trainers.rl_kl import KLController

ADAPTIVE = {"coef": 0.1, "controller": "adaptive", "target": 0.05, "horizon": 1000}


def controller(**changes):
    return KLController(KLConfig.model_validate(ADAPTIVE | changes))


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.05, 1.0), (0.055, 1 + 0.1 * 0.2), (10.0, 1 + 0.2 * 0.2), (0.045, 1 - 0.1 * 0.2), (0.0, 0.96)]
)
def test_a_step_by_hand(kl, factor):
    """200 of 1000 samples; the error is held at a fifth."""
    made = controller()
    made.update(kl, 200)
    assert made.coef == pytest.approx(0.1 * factor)
    assert made.metrics() == {"kl_coef": made.coef}


def test_a_kl_that_is_not_finite_and_a_fixed_coefficient_change_nothing():
    made, fixed = controller(), KLController(KLConfig(coef=0.1))
    for kl in (math.nan, math.inf):
        made.update(kl, 200)
    fixed.update(10.0, 200)
    assert made.coef == fixed.coef == 0.1
    assert fixed.metrics() == {}


def test_it_goes_on_where_it_was_and_with_other_settings_begins_anew():
    made = controller()
    made.update(1.0, 200)
    same, other = controller(), controller(coef=0.3)
    for each in (same, other):
        each.load_state_dict(made.state_dict())
    assert same.coef == made.coef != 0.1
    assert other.coef == 0.3
