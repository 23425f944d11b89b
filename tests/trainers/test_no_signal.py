"""Warnings about steps from which nothing can be learnt: when they are given; counts go on after a resume.

Not covered: that the loop shows them (tests/distributed/test_bad_rewards.py).
"""

import math

import torch

from megarlhf.data.samples.encoders import PromptSample
from megarlhf.trainers.experience.no_signal import SignalWatch, signal_warning
from tests.refuses import missing_names
from tests.tables import Letters
from tests.trainers.test_metrics import experience


def metrics(silent: float, mean: float = 0.5, std: float = 0.1):
    return {"groups_without_signal": silent, "reward_mean": mean, "reward_std": std}


def values(*numbers: float):
    return torch.tensor(numbers, dtype=torch.float64)


def test_silent_steps_are_said_at_once_and_then_ever_more_seldom():
    watch, varied = SignalWatch(), {"rule": values(1, 2)}
    warnings = {step: watch.watch(step, varied, metrics(1.0)) for step in range(1, 31)}
    assert [step for step in warnings if warnings[step]] == [1, 5, 25]
    assert missing_names(*warnings[5], "in each group", "5 steps in a row", "reward_mean 0.5") == []
    assert watch.watch(31, varied, metrics(0.875)) == []
    assert watch.watch(32, varied, metrics(1.0)), "counted from 1 again"


def test_where_groups_are_not_compared_all_rewards_must_be_equal():
    watch, varied = SignalWatch(), {"rule": values(1, 2)}
    assert watch.watch(1, varied, metrics(1.0), grouped=False) == []
    (warning,) = watch.watch(2, varied, metrics(0.0, std=0.0), grouped=False)
    assert missing_names(warning, "all rewards are equal", "reward_mean 0.5") == []
    assert "group" not in warning


def test_a_constant_reward_is_said_after_five_steps_over_a_resume():
    """Of the values that there are; another constant begins anew, and a step without values counts for nothing."""
    watch = SignalWatch()
    row = [values(0.5, 0.5), values(0.5, math.nan), values(math.nan, math.nan), values(0.5, 0.5), values(0.5, 0.5)]
    assert [watch.watch(step, {"form": each}, metrics(0)) for step, each in enumerate(row, 1)] == [[]] * 5
    again = SignalWatch()
    again.load_state_dict(watch.state_dict())
    (warning,) = again.watch(6, {"form": values(0.5, 0.5)}, metrics(0))
    assert missing_names(warning, "'form'", "0.5", "5 steps in a row") == []
    others = [values(0.25, 0.25)] * 4 + [values(0.25, 0.5)] + [values(0.5, 0.5)] * 4
    assert not any(again.watch(step, {"form": each}, metrics(0)) for step, each in enumerate(others, 7))


def test_zero_for_all_of_the_first_step_only():
    zero = {"rule": values(0, 0), "other": values(0, 1)}
    assert SignalWatch().watch(1, zero, metrics(0)) == ["reward 'rule' is 0 for every sample of the first step"]
    assert SignalWatch().watch(2, zero, metrics(0)) == []


def test_the_warning_has_causes_and_a_sample():
    table = experience().with_per_sample({"records": torch.tensor([3, 3, 4]), "reward/rule": values(0, 0, 0)})
    prompts = {3: PromptSample([1], "x" * 300 + "1+1=", {"answer": "2"}, 3)}
    given = {**metrics(1.0, mean=0.0), "finished_fraction": 0.0}
    text = signal_warning(1, table, given, SignalWatch(), prompts.__getitem__, Letters(), grouped=True)
    sample = ("response 'db'", "fields {'answer': '2'}", "rewards: rule 0")
    assert "x1+1='" in text, "the end of the prompt"
    assert missing_names(text, "WARNING step 1", "reward_mean 0", "'rule' is 0", "Likely causes", *sample) == []
    assert signal_warning(2, table, metrics(0), SignalWatch(), prompts.__getitem__, Letters(), grouped=True) == ""
