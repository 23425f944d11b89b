"""Which step is the best, whose exports stay, and when a run gets no better. Not covered: whole runs
(tests/distributed/test_best.py), what a configuration may ask for (tests/config/test_refusals.py)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megarlhf.config import StopConfig
from megarlhf.config.choices import BestConfig, PatienceConfig
from megarlhf.trainers.run.best_checkpoint import Best, Patience

NAN = math.nan


def stops_at(cfg: PatienceConfig, command: str, metric: str, values: list[float]) -> int | None:
    """Which evaluation, from 0, ends the run; the state goes through JSON after each."""
    state: dict[str, Any] | None = None
    for n, value in enumerate(values):
        rule = Patience(cfg, command)
        if state is not None:
            rule.load_state_dict(state)
        if rule.watch({metric: value}):
            assert rule.reason == f"stopped: {metric} has not improved for {cfg.patience} evaluations"
            return n
        state = json.loads(json.dumps(rule.state_dict(), allow_nan=False))
    return None


@pytest.mark.parametrize(
    ("command", "keys", "metric", "values", "expected"),
    [
        ("sft", {}, "eval_loss", [3.0, 2.0, 2.5, 1.9, 2.0, 1.9], 5),
        ("sft", {}, "eval_loss", [3.0, 2.0, 2.5, 1.9, 2.0, 1.8], None),
        ("sft", {"min_change": 0.2}, "eval_loss", [3.0, 2.0, 1.9, 1.85], 3),
        ("sft", {}, "eval_loss", [3.0, NAN, NAN, NAN, 2.0], None),
        ("rm", {"metric": "eval_pair_accuracy"}, "eval_pair_accuracy", [0.5, 0.7, 0.6, 0.7], 3),
        ("rm", {"metric": "eval_chosen_score", "mode": "min"}, "eval_chosen_score", [1.0, 0.0, 0.5, 0.5], 3),
        ("rl", {}, "eval_reward_mean", [0.0, 1.0, 0.5, 0.9], 3),
        ("rl", {"metric": "eval_accuracy"}, "eval_reward_mean", [0.0] * 5, None),
    ],
)
def test_a_run_ends_after_two_evaluations_that_are_no_better(
    command: str, keys: dict[str, Any], metric: str, values: list[float], expected: int | None
) -> None:
    assert stops_at(PatienceConfig(patience=2, **keys), command, metric, values) == expected


def test_without_patience_nothing_ends_and_another_metric_begins_anew() -> None:
    assert stops_at(PatienceConfig(), "sft", "eval_loss", [1.0] * 9) is None
    before = Patience(PatienceConfig(patience=3), "sft")
    for loss in (0.1, 0.2, 0.3):
        assert not before.watch({"eval_loss": loss})
    other = Patience(PatienceConfig(patience=1, metric="eval_perplexity"), "sft")
    other.load_state_dict(before.state_dict())
    assert not other.watch({"eval_perplexity": 9.0})
    shorter = Patience(PatienceConfig(patience=1), "sft")
    shorter.load_state_dict(before.state_dict())
    assert shorter.watch({"eval_loss": 0.2}), "what has been counted stays"


def test_the_earlier_name_is_the_same_rule() -> None:
    earlier = StopConfig.model_validate({"validation_reward_patience": 2})
    assert (earlier.patience, earlier.metric) == (2, "eval_reward_mean")
    assert StopConfig.model_validate(earlier.model_dump()) == earlier


def watched(best: Best, step: int, value: float, *, only: bool = True) -> bool:
    better = best.watch({"eval_loss": value})
    if better:
        best.take(step, only=only)
    return better


def test_the_best_and_what_earlier_points_need() -> None:
    """Steps 2, 4 and 6 each get better; step 4 is exported anyway. A point of step 3 goes on with step 2's export."""
    best = Best(BestConfig(metric="eval_loss"), "sft")
    assert best.step is None
    found = [
        watched(best, step, loss, only=step != 4) for step, loss in ((1, NAN), (2, 3.0), (3, 3.0), (4, 2.0), (6, 1.0))
    ]
    assert found == [False, True, False, True, True]
    assert (best.step, best.description, set(best.needed())) == (6, "best eval_loss: 1, step 6", {2, 4, 6})
    assert best.release(3) == []
    assert set(best.needed()) == {2, 4, 6}
    assert best.release(4) == [2], "the points that are left know of step 4"
    assert set(best.needed()) == {4, 6}
    assert best.release(None) == [], "step 4 was exported for something else"
    assert set(best.needed()) == {6}
    assert best.release(None) == []


def test_an_export_that_could_not_be_written_is_not_the_best() -> None:
    best = Best(BestConfig(metric="eval_loss"), "sft")
    assert best.watch({"eval_loss": 1.0})
    assert best.step is None
    assert best.watch({"eval_loss": 2.0}), "better than nothing"


def test_the_best_is_kept_in_a_point_and_of_another_metric_forgotten() -> None:
    best = Best(BestConfig(metric="eval_loss"), "sft")
    assert watched(best, 2, 3.0)
    state = json.loads(json.dumps(best.state_dict()))
    same, other = Best(BestConfig(metric="eval_loss"), "sft"), Best(BestConfig(metric="eval_perplexity"), "sft")
    for each in (same, other):
        each.load_state_dict(state)
    assert (same.step, other.step) == (2, None)
    assert same.forgotten == ""
    turned = Best(BestConfig(metric="eval_loss", mode="max"), "sft")
    turned.load_state_dict(state)
    for each in (other, turned):
        assert each.forgotten.startswith("WARNING: the best so far, step 2, was chosen by another rule (eval_loss = 3)")
    assert not same.watch({"eval_loss": 3.5})
    assert not Best(None, "").watch({"eval_loss": 0.0})
