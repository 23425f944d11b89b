"""The algorithms compared on the demo's task: configurations and arithmetic. Not covered: what is learnt."""

import math

import pytest

from megarlhf.config import RLConfig, load_config
from megarlhf.planning.batch import rl_batch_numbers
from megarlhf.planning.unused_keys import without_effect
from megarlhf.trainers.rl.advantages import ADVANTAGES
from tools.demo.pipeline import BY_NAME
from tools.demo.seeds import VARIANTS, folder_of, summary_of


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_a_configuration_that_means_what_it_says(variant):
    stage, changes = VARIANTS[variant]
    cfg = load_config(RLConfig, BY_NAME[stage].config, changes)
    rl_batch_numbers(cfg, 2)
    set_by_variant = {change.partition("=")[0] for change in changes}
    unread = {note.partition(": ")[2].partition(" ")[0] for note in without_effect(cfg)}
    assert not unread & set_by_variant
    if variant.startswith("control"):
        assert cfg.algo.shuffle_rewards
        assert cfg.algo.lam == 1 or not cfg.algo.needs_critic


def test_every_advantage_has_a_variant_and_every_variant_a_folder():
    configs = [load_config(RLConfig, BY_NAME[stage].config, changes) for stage, changes in VARIANTS.values()]
    assert {cfg.algo.advantage for cfg in configs} == ADVANTAGES.keys()
    assert len({folder_of(variant) for variant in VARIANTS}) == len(VARIANTS)


def test_the_interval_of_the_gain_by_hand():
    """Gains .2, .3, .4: mean .3, deviation .1, t of two degrees of freedom 4.303."""
    row = {"kl": 0.1, "steps": 10}
    by_seed = {str(n): {"sft": 0.5, "grpo": {"test": 0.7 + n / 10, **row}} for n in range(3)}
    found = summary_of("grpo", by_seed)
    assert found["gain"] == pytest.approx(0.3)
    assert found["high"] - found["gain"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert found["low"] == pytest.approx(0.3 - 4.303 * 0.1 / math.sqrt(3))
    assert summary_of("grpo", {"0": by_seed["0"]})["low"] is None
