"""The algorithms compared on the demo's task: configurations and arithmetic. Not covered: what is learnt."""

import math

import pytest

from megarlhf.config import RLConfig, load_config
from megarlhf.planning.batch import rl_batch_numbers
from megarlhf.planning.unused_keys import without_effect
from megarlhf.trainers.rl.advantages import ADVANTAGES
from tools.demo.pipeline import BY_NAME
from tools.demo.seeds import SLICED, SLICES, VARIANTS, difference_of, folder_of, summary_of

ALL = {**VARIANTS, **SLICED}


@pytest.mark.parametrize("variant", ALL)
def test_a_variant_is_a_configuration_that_means_what_it_says(variant):
    stage, changes = ALL[variant]
    cfg = load_config(RLConfig, BY_NAME[stage].config, changes)
    rl_batch_numbers(cfg, 2)
    set_by_variant = {change.partition("=")[0] for change in changes}
    unread = {note.partition(": ")[2].partition(" ")[0] for note in without_effect(cfg)}
    assert not unread & set_by_variant
    assert cfg.rollout.slices == (SLICES if variant.endswith("in slices") else 1)
    if variant in SLICED:
        assert cfg.train.stop.max_kl is None, "both have equally many steps"
    if variant.startswith("control"):
        assert cfg.algo.shuffle_rewards
        assert cfg.algo.lam == 1 or not cfg.algo.needs_critic


def test_every_advantage_has_a_variant_and_every_variant_a_folder():
    configs = [load_config(RLConfig, BY_NAME[stage].config, changes) for stage, changes in VARIANTS.values()]
    assert {cfg.algo.advantage for cfg in configs} == ADVANTAGES.keys()
    assert len({folder_of(variant) for variant in ALL}) == len(ALL)


def test_the_interval_of_the_gain_by_hand():
    """Gains .2, .3, .4: mean .3, deviation .1, t of two degrees of freedom 4.303."""
    row = {"kl": 0.1, "steps": 10}
    by_seed = {str(n): {"sft": 0.5, "grpo": {"test": 0.7 + n / 10, **row}} for n in range(3)}
    found = summary_of("grpo", by_seed)
    assert found["gain"] == pytest.approx(0.3)
    assert found["high"] - found["gain"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert found["low"] == pytest.approx(0.3 - 4.303 * 0.1 / math.sqrt(3))
    assert summary_of("grpo", {"0": by_seed["0"]})["low"] is None


def test_the_difference_of_slices_by_hand():
    """Differences -.01, 0, .01 of three seeds: mean 0, two-sided t of two degrees of freedom at 90% 2.920."""

    def row(test, kl):
        return {"test": test, "kl": kl}

    by_seed = {str(n): {"ppo, whole": row(0.8, 0.1), "ppo, in slices": row(0.8 + (n - 1) / 100, 0.2)} for n in range(3)}
    found = difference_of("ppo", by_seed)
    assert found["difference"] == pytest.approx(0.0)
    assert found["low"] == pytest.approx(-2.920 * 0.01 / math.sqrt(3))
    assert (found["kl whole"], found["kl in slices"]) == pytest.approx((0.1, 0.2))
