"""Which reward is an accuracy, and the accuracy by hand. In runs: distributed/test_shown.py."""

from __future__ import annotations

import pytest
import torch

from megarlhf.config import RewardConfig
from megarlhf.rollout.rewards.accuracy import accuracy_metrics, find_accuracy

EXACT, NUMERIC = RewardConfig(kind="rule", rule="exact_match"), RewardConfig(kind="rule", rule="numeric_match")
MODEL = RewardConfig(kind="model")
OWN = RewardConfig(kind="rule", rule="tests.distributed.user_rewards:short", name="short")
DECLARED = RewardConfig(kind="rule", rule="tests.distributed.user_rewards:right")


@pytest.mark.parametrize(
    ("rewards", "label"),
    [((MODEL, EXACT), "exact_match"), ((OWN, NUMERIC), "numeric_match"), ((DECLARED, OWN), DECLARED.rule)],
)
def test_by_default_it_is_the_only_rule_that_says_0_or_1(rewards: tuple[RewardConfig, ...], label: str) -> None:
    found = find_accuracy(None, rewards)
    assert (found.label, found.judge, found.note) == (label, None, "")


@pytest.mark.parametrize(
    ("rewards", "words"),
    [((MODEL, OWN), "none of rewards is known to say 0 or 1"), ((EXACT, NUMERIC), "exact_match, numeric_match all do")],
)
def test_of_none_or_several_there_is_none_and_it_is_said(rewards: tuple[RewardConfig, ...], words: str) -> None:
    found = find_accuracy(None, rewards)
    assert (found.label, found.judge) == (None, None)
    assert words in found.note
    assert "eval.accuracy=exact_match" in found.note


def test_a_name_is_a_rewards_or_a_rules() -> None:
    assert find_accuracy("short", (MODEL, OWN)).label == "short"
    assert find_accuracy("short", (MODEL, OWN)).judge is None
    judged = find_accuracy("exact_match", (MODEL,))
    assert (judged.label, judged.judge) == ("exact_match", EXACT)
    with pytest.raises(
        ValueError, match=r"'exact_mach' is no name in rewards and no rule; did you mean 'exact_match'\?"
    ):
        find_accuracy("exact_mach", (MODEL,))
    with pytest.raises(ValueError, match="'model' is the reward model, whose score is no accuracy"):
        find_accuracy("model", (MODEL,))
    with pytest.raises(ValueError, match="no_such"):
        find_accuracy("tests.distributed.user_rewards:no_such", (MODEL,))


def test_the_accuracy_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """1, 0, 1, 1 of five, of which one has no value: 3 / 4. Nothing but None is no accuracy; nor is a half."""
    of, nan = find_accuracy("exact_match", ()), float("nan")
    assert accuracy_metrics(of, torch.tensor([1.0, nan, 0.0, 1.0, 1.0])) == {
        "eval_accuracy": 0.75,
        "eval_accuracy_none": 1,
    }
    assert accuracy_metrics(of, torch.tensor([nan, nan])) == {"eval_accuracy": None, "eval_accuracy_none": 2}
    assert caplog.records == []
    assert accuracy_metrics(of, torch.tensor([1.0, 0.5, -1.0])) == {"eval_accuracy": None, "eval_accuracy_none": 0}
    assert "exact_match returned 0.5 for a held-out response, and 2 times a value other than 0 or 1" in caplog.text
