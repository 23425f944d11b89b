"""Rewards are called on a real record before a run: what tells nothing apart, fails or cannot be called is refused.

Not covered: classifiers and servers, which are not asked; how functions of each form are called
(tests/rollout/test_reward_forms.py).
"""

import json

import pytest

from megarlhf.config.rewards import RewardConfig
from megarlhf.planning.preflight import preflight
from megarlhf.planning.rewards import try_rewards
from tests.planning.configs import rl

OURS = "tests.planning.users_rewards:"
PLAIN = {"prompt": "1+1=", "answer": "2"}
VERL = {"prompt": "1+1=", "data_source": "a", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 0}}


def tried(paths, reward, *records):
    """Notes of a start with the reward, on these records."""
    if isinstance(reward, str):
        reward = {"rule": OURS + reward}
    paths["train"].write_text("".join(json.dumps(record) + "\n" for record in records or (PLAIN,) * 24))
    return try_rewards(rl(paths, rewards=[{"kind": "rule", **reward}]))


@pytest.mark.parametrize(
    ("reward", "record"),
    [
        ("verl", VERL),
        ("verl", PLAIN),
        ("trl_boxed", {"prompt": "1+1=", "ground_truth": "2"}),
        ("trl_format", PLAIN),
        ("openrlhf", PLAIN),
        ("not_too_long", PLAIN),
        ({"rule": "exact_match"}, {"prompt": "1+1=", "answer": [2.0, None]}),
        ({"rule": "numeric_match"}, {"prompt": "1+1=", "answer": "\N{MINUS SIGN}2"}),
        ({"rule": OURS + "constant", "check": "call"}, PLAIN),
        ({"rule": OURS + "hangs", "check": "none"}, PLAIN),
        ({"rule": "tags"}, PLAIN),
    ],
)
def test_what_is_right_says_nothing(paths, reward, record):
    assert tried(paths, reward, record) == []


@pytest.mark.parametrize(
    ("reward", "record", "words"),
    [
        ("constant", PLAIN, "it gives 0.5 for all texts, with '2' as the right answer and '3' as a wrong one"),
        (
            "verl_compares_types",
            {**VERL, "reward_model": {"ground_truth": 2}},
            "it gives the same for either, in every form that was tried, with '2' as the right answer",
        ),
        ("reads_another_column", PLAIN, "raised KeyError: 'anwser'; .*users_rewards.py:.* check: none leaves out"),
        ("verl", {"prompt": "1+1=", "solution": "2"}, "reads ground_truth, and the record has none of ground_truth"),
        ("trl_boxed", PLAIN, r"takes 'ground_truth', and the records of data.train have 'answer'; name the column"),
        ("trl_asks", PLAIN, "takes 'verdict', and the records of data.train have 'answer'"),
        ({"rule": OURS + "hangs", "timeout_seconds": 0.5}, PLAIN, "took longer than 0.5 s"),
        ("exits", PLAIN, "raised SystemExit: 0; a function must return, not exit"),
    ],
)
def test_what_tells_nothing_apart_or_fails_is_refused(paths, reward, record, words):
    with pytest.raises(ValueError, match=words) as error:
        tried(paths, reward, record)
    assert str(error.value).startswith(f"reward '{OURS}")


def test_another_records_answer_is_the_wrong_one(paths):
    records = [{"prompt": "1+1=", "answer": word} for word in ("cat", "dog")]
    with pytest.raises(ValueError, match="with 'cat' as the right answer and 'dog' as a wrong one"):
        tried(paths, "constant", *records)


def test_a_reward_of_some_records_is_called_on_one_of_them(paths):
    """And nothing is lost where it applies to none that was read."""
    other, code = {**PLAIN, "task": "maths"}, {"prompt": "1+1=", "task": "code", "answer": "print(2)"}
    assert tried(paths, "trl_of_code", other, code) == []
    (note,) = tried(paths, "trl_of_code", other, other)
    assert "does not apply to the first 2 records of data.train" in note


def test_what_is_not_compared_is_said(paths):
    (note,) = tried(paths, "trl_asks", {**PLAIN, "verdict": "x"})
    assert note.endswith("is async, and is not called before the start (check: scores does it)")
    (note,) = tried(paths, "constant", {"prompt": "1+1="})
    assert note.endswith("gives 0.5 for two texts; the records have no answer, so that it was only called")
    (note,) = try_rewards(rl(paths, rewards=[{"kind": "http", "url": "http://judge", "name": "judge"}]))
    assert note == "reward 'judge' asks a server, and is not called before the start (check: scores does it)"


def test_a_mistake_in_rewards_is_said_before_models_and_data_are_read(paths):
    """And is not blamed on a line of the data."""
    for rule, words in (("exactmatch", "unknown reward rule"), (OURS + "mixture", "its parameters are")):
        cfg = rl(paths, rewards=[{"kind": "rule", "rule": rule}], data={"train": paths["root"] / "none"})
        with pytest.raises(ValueError, match=words) as error:
            preflight("rl", cfg, 1)
        assert "data.train" not in str(error.value)


def test_the_start_tries_rewards(paths):
    with pytest.raises(ValueError, match="does not tell a right answer from a wrong one"):
        preflight("rl", rl(paths, rewards=[{"kind": "rule", "rule": OURS + "constant"}]), 1)


def test_only_what_can_be_called_has_the_key():
    with pytest.raises(ValueError, match="a reward of kind 'classifier' does not read check"):
        RewardConfig(kind="classifier", path="x", check="call")
