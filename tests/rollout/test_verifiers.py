"""Rules that ask math-verify and reasoning-gym, by themselves and in their worker processes."""

import contextlib

import pytest
import torch

from megarlhf.config import RewardConfig
from megarlhf.config.rewards import IN_WORKERS
from megarlhf.rollout.rewards.accuracy import find_accuracy
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.rules import bind_rule, field_check
from megarlhf.rollout.rewards.score import make_source
from megarlhf.rollout.rewards.verifiers import VERIFIERS, math_verify, reasoning_gym
from tests.data.in_memory import load_records


def results(reward, responses, fields):
    """Of a batch, by the processes that a run would start."""
    count = len(responses)
    batch = RewardBatch(
        [""] * count, responses, [[0]] * count, [[0]] * count, [True] * count, fields, [None] * count, range(count)
    )
    with contextlib.closing(make_source(reward, torch.device("cpu"))) as source:
        return source.start(batch).wait()


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("1/2", "so it is 0.5", 1),
        (r"\frac{1}{2}", r"The answer is $\frac{2}{4}$.", 1),
        ("x=3", r"\boxed{3}", 1),
        ("42", "42.0", 1),
        (42, "42", 1),
        ("1,000", "1000", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        (r"It is \boxed{7}", "7", 1),
        ("1/2", r"First \boxed{1/3}. No, it is \boxed{1/2}.", 1),
        ("1/3", r"First \boxed{1/3}. No, it is \boxed{1/2}.", 0),
        ("7", r"first \boxed{6}; then \boxed{\boxed{7}}", 1),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}}", 1),
        ("7", r"\boxed{x is \boxed{7}", 1),
        ("7", "\\boxed{" * 20000 + r" \boxed{7}", 1),
        ("7", r"x is \boxed{7}. Let me check again: \boxed{", 1),
        ("7", r"I write \boxed{7}. Use \boxed to mark answers, \boxed{} too.", 1),
        (r"\{1,2\}", r"so $x=\boxed{1}$ or $x=\boxed{2}$", 1),
        ("1,2", r"\boxed{1},\boxed{2}", 1),
        ("3", r"\boxed{1},\boxed{2}. Wait: \boxed{3}", 1),
        ("42", "first 42, then 43", 0),
        ("42", r"\boxed{24}", 0),
        ("(1,2]", r"\boxed{[1,2]}", 0),
        ("-3", "It fell to \N{MINUS SIGN}3.", 1),
        ("3", "It fell to \N{MINUS SIGN}3.", 0),
        ("\N{EN DASH}3", r"\boxed{-3}", 1),
        (["7", {"text": "0.5"}], r"\frac{1}{2}", 1),
        (42.0, "42", 1),
    ],
)
def test_answers_are_equal_as_mathematics(answer, response, score):
    pytest.importorskip("math_verify")
    expected = {"score": float(score), "no_answer": 0.0, "undecided": 0.0}
    assert math_verify("", response, {"answer": answer}) == expected


def test_nothing_found_and_what_cannot_be_computed_are_told_apart():
    pytest.importorskip("math_verify")
    assert math_verify("", "I do not know", {"answer": "42"}) == {"score": 0.0, "no_answer": 1.0, "undecided": 0.0}
    tower = math_verify("", r"\boxed{9^{9^{9^{9}}}}", {"answer": "42"}, seconds=1)
    assert tower == {"score": 0.0, "no_answer": 0.0, "undecided": 1.0}


def test_maths_in_worker_processes():
    """Its time limit is a signal, which no thread could get."""
    pytest.importorskip("math_verify")
    reward = RewardConfig(kind="rule", rule="math_verify", args={"seconds": 2}, workers=2)
    found = results(reward, ["0.5", "2", r"\boxed{9^{9^{9^{9}}}}", "3"], [{"answer": "1/2"}] * 3 + [{}])
    assert [result.value for result in found] == [1.0, 0.0, 0.0, None]
    assert [(each.components or {}).get("undecided") for each in found] == [0.0, 0.0, 1.0, None]
    assert found[3].error == "failed: it needs the field 'answer', found none; add it to the prompts"


def test_generated_tasks_in_worker_processes():
    """Also of a generator that walks through sets."""
    pytest.importorskip("reasoning_gym")
    records = load_records("reasoning_gym:isomorphic_strings?size=3&seed=5", fields=("prompt",))
    right = [record["answer"] for record in records]
    reward = RewardConfig(kind="rule", rule="reasoning_gym", args={"tag": "answer", "exact": True})
    responses = [f"Well. <answer>no</answer> <answer> {right[0]} </answer>", right[1], "<answer>perhaps</answer>"]
    assert [(o.value, o.error) for o in results(reward, responses, records)] == [(1.0, ""), (0.0, ""), (0.0, "")]


def test_a_score_is_the_verifiers_own():
    """Its default: the share of an answer that contains the right one."""
    pytest.importorskip("reasoning_gym")
    (record,) = load_records("reasoning_gym:leg_counting?size=1&seed=5", fields=("prompt",))
    long = f"{record['answer']} legs"
    assert reasoning_gym("", record["answer"] + "\n", record) == 1.0
    assert reasoning_gym("", long, record) == pytest.approx(len(record["answer"]) / len(long))
    assert reasoning_gym("", long, record, exact=True) == 0.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("math_verify", {"seconds": 0.5}, "seconds = 0.5, expected a whole number"),
        ("math_verify", {"second": 1}, "has no argument 'second'; did you mean 'seconds'"),
        ("reasoning_gym", {"tag": ""}, "tag = '' and exact = False"),
        ("reasoning_gym", {"exact": "yes"}, "exact = 'yes', expected a name, and true or false"),
    ],
)
def test_bad_arguments_are_refused(name, args, message):
    with pytest.raises(ValueError, match=message):
        bind_rule(name, args)


@pytest.mark.parametrize("name", VERIFIERS)
def test_without_the_package_it_is_said_what_to_install(name, monkeypatch):
    monkeypatch.setattr("megarlhf.rollout.rewards.verifiers.find_spec", lambda name: None)
    monkeypatch.setattr("megarlhf.data.sources.reasoning_gym.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"it needs the package .*: pip install 'megarlhf\[verifiers\]'"):
        bind_rule(name, {})


def test_records_are_looked_at_before_anything_is_generated():
    with pytest.raises(
        ValueError, match="reward rule 'math_verify': the record's answer is ' ', in which there is no text"
    ):
        field_check("math_verify")({"answer": " "})
    with pytest.raises(ValueError, match=r"it judges generated tasks: set data\.train = reasoning_gym:TASK"):
        field_check("reasoning_gym")({"answer": "3"})


def test_they_run_in_workers_and_may_be_the_accuracy():
    assert set(IN_WORKERS) == {*VERIFIERS, "regex"}
    with pytest.raises(ValueError, match="'math_verify' runs in processes of its own; workers = 0, give 1 or more"):
        RewardConfig(kind="rule", rule="math_verify", workers=0)
    pytest.importorskip("reasoning_gym")
    assert find_accuracy("reasoning_gym", []).judge.args == {"exact": True}
    partial = RewardConfig(kind="rule", rule="reasoning_gym")
    assert find_accuracy(None, [partial]).label is None
    assert find_accuracy(None, [partial.model_copy(update={"args": {"exact": True}})]).label == "reasoning_gym"
