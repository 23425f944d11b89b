"""Steps from which nothing can be learnt: when that is said, and of what; counts go on after a resume.

Not covered: that the loop says it (tests/distributed/test_bad_rewards.py).
"""

import math

import torch

from megarlhf.data.samples.encoders import PromptSample
from megarlhf.trainers.experience.no_signal import SignalWatch, alarm
from tests.trainers.test_metrics import experience


class Letters:
    """A tokenizer: one letter an id."""

    def decode(self, ids, *, continuation=False):
        return "".join(chr(96 + n) for n in ids)


def metrics(silent: float, mean: float = 0.5, std: float = 0.1):
    return {"groups_without_signal": silent, "reward_mean": mean, "reward_std": std}


def values(*numbers: float):
    return torch.tensor(numbers, dtype=torch.float64)


def test_silent_steps_are_said_at_once_and_then_ever_more_seldom():
    watch, varied = SignalWatch(), {"rule": values(1, 2)}
    said = {step: watch.watch(step, varied, metrics(1.0)) for step in range(1, 31)}
    assert [step for step in said if said[step]] == [1, 5, 25]
    assert said[5] == [
        "nothing can be learnt: in each group all rewards are equal, for 5 steps in a row (reward_mean 0.5)"
    ]
    assert watch.watch(31, varied, metrics(0.875)) == []
    assert watch.watch(32, varied, metrics(1.0)), "a row of its own"


def test_where_groups_are_not_compared_all_rewards_must_be_equal():
    watch, varied = SignalWatch(), {"rule": values(1, 2)}
    assert watch.watch(1, varied, metrics(1.0), grouped=False) == []
    (sentence,) = watch.watch(2, varied, metrics(0.0, std=0.0), grouped=False)
    assert sentence == "nothing can be learnt: all rewards are equal (reward_mean 0.5)"


def test_a_constant_reward_is_said_after_five_steps_over_a_resume():
    """Of the values that there are; another constant begins anew, and a step without values counts for nothing."""
    watch = SignalWatch()
    row = [values(0.5, 0.5), values(0.5, math.nan), values(math.nan, math.nan), values(0.5, 0.5), values(0.5, 0.5)]
    assert [watch.watch(step, {"form": each}, metrics(0)) for step, each in enumerate(row, 1)] == [[]] * 5
    again = SignalWatch()
    again.load_state_dict(watch.state_dict())
    (sentence,) = again.watch(6, {"form": values(0.5, 0.5)}, metrics(0))
    assert sentence == "reward 'form' is 0.5 for every sample, for 5 steps in a row"
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
    text = alarm(1, table, given, SignalWatch(), prompts.__getitem__, Letters(), grouped=True)
    assert text.startswith(
        "WARNING step 1: nothing can be learnt: in each group all rewards are equal (reward_mean 0); "
    )
    for words in (
        "reward 'rule' is 0 for every sample of the first step. Likely causes: the reward looks for another form",
        "x1+1=', response 'db', fields {'answer': '2'}, rewards: rule 0",
    ):
        assert words in text
    assert alarm(2, table, metrics(0), SignalWatch(), prompts.__getitem__, Letters(), grouped=True) == ""
