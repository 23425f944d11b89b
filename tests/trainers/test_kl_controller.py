"""The controller of the KL's coefficient, against values worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from megarlhf.config import AlgoConfig, KLConfig
from megarlhf.experience import Experience
from megarlhf.trainers.rl.kl_controller import KLController
from megarlhf.trainers.rl.update import learners
from tests.tables import make_rollouts, ragged

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


def loss_of(step, **algo):
    """The actor's loss in a step of a run of two."""
    made = AlgoConfig.model_validate({"advantage": "grpo", **algo})
    kl = KLController(made.kl)
    kl.update(10.0, 500)
    cfg = SimpleNamespace(
        algo=made,
        ptx=None,
        loss_constant=4,
        rollout=SimpleNamespace(temperature=1.0, is_stale=False),
        rollout_correction=made.rollout_correction,
        train=SimpleNamespace(critic_warmup_steps=0, num_steps=2),
    )
    actor = SimpleNamespace(shard=SimpleNamespace(vocabulary=lambda: None))
    rollouts = make_rollouts(ragged([1, 2], dtype=torch.int64), ragged([0.0, 0.0]), torch.tensor([True]))
    experience = Experience((torch.tensor([1]),), torch.tensor([0]), rollouts)
    (learner,) = learners(SimpleNamespace(cfg=cfg, actor=actor, critic=None, kl=kl), experience, [0], step)
    return learner.loss


@pytest.mark.parametrize(("placement", "estimator", "factor"), [("loss", "k3", 1.0), ("reward", "k1", 0.0)])
def test_the_coefficient_in_force_is_that_of_the_loss(placement, estimator, factor):
    """Where the KL is in the loss; the configured one is where the controller began."""
    loss = loss_of(1, kl=ADAPTIVE | {"placement": placement, "estimator": estimator})
    assert loss.kl_coef == pytest.approx(factor * 0.1 * 1.1)


def test_the_entropy_s_coefficient_is_that_of_the_step():
    assert [loss_of(step, entropy_coef=0.1, entropy_coef_end=0.3).entropy_coef for step in (0, 1)] == [0.1, 0.3]
