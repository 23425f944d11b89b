"""What a step's samples were like, by hand: metrics, and rows of a table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarlhf.config import RLConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.experience import Experience
from megarlhf.trainers.rl.metrics import describe, kl_by_sample
from megarlhf.trainers.rl.sample_rows import training_rows
from tests.config.examples import RL
from tests.tables import Letters, make_rollouts, ragged

CFG = RLConfig.model_validate({**RL, "rollout": {"num_samples_per_prompt": 3}, "samples": {"count": 2}})


def experience() -> Experience:
    """Three samples of two, one and one response tokens; the third is of another group. kl (k1): .5 and .25; 0; 0."""
    rollouts = make_rollouts(
        responses=ragged([4, 2], [2], [5], dtype=torch.int64),
        logprobs=ragged([-1.0, -2.0], [-0.5], [-1.0]),
        finished_N=torch.tensor([True, True, False]),
        version=7,
    )
    columns = {
        "old_logprobs": ragged([-1.0, -2.0], [-0.5], [-1.0]),
        "ref_logprobs": ragged([-1.5, -2.25], [-0.5], [-1.0]),
        "values": ragged([0.5, 0.25], [1.0], [9.0]),
        "returns": ragged([1.0, 0.75], [1.5], [0.0]),
    }
    prompts = (torch.tensor([1, 5]),) * 3
    table = Experience(prompts=prompts, groups_N=torch.tensor([0, 0, 1]), rollouts=rollouts, columns=columns)
    rewards = {"rewards": torch.tensor([1.0, 3.0, 0.0]), "reward/rule": torch.tensor([0.5, 1.5, math.nan])}
    return table.with_per_sample(rewards)


def test_metrics_are_of_the_samples_that_have_a_reward() -> None:
    """k3: (e^-.5 - 1 + .5 + e^-.25 - 1 + .25) / 4. Returns less values are .5 on every trained token: variance 0."""
    kept_N = torch.tensor([True, True, False])
    dropped = experience().with_per_sample({"trained": kept_N, "rewarded": kept_N})
    metrics = describe(dropped, CFG)
    expected = {"reward_mean": 2.0, "reward_std": 1.0, "groups_without_signal": 0.0, "explained_variance": 1.0}
    expected |= {"value_mean": 1.75 / 3, "kl": 0.1875, "kl_k1": 0.1875, "tokens": 4}
    expected |= {"finished_fraction": 2 / 3, "samples_left_out": 1}
    expected |= {"kl_k3": (math.exp(-0.5) - 0.5 + math.exp(-0.25) - 0.75) / 4, "response_length_mean": 4 / 3}
    assert metrics == pytest.approx(expected)
    masked = describe(experience().with_per_sample({"trained": kept_N, "rewarded": kept_N | True}), CFG)
    found = masked["reward_mean"], masked["samples_left_out"], masked["value_mean"]
    assert found == pytest.approx((4 / 3, 1, 1.75 / 3))
    kept = describe(experience(), CFG)
    assert (kept["reward_mean"], kept["groups_without_signal"]) == pytest.approx((4 / 3, 1 / 3))
    assert kept["explained_variance"] < 0


def rows(table: Experience) -> list[dict[str, Any]]:
    prompt = PromptSample(tokens=[1, 5], text="bf", fields={"answer": 7}, index=0)
    kl_N = kl_by_sample(table, CFG.algo.kl)
    return [dict(row) for row in training_rows(CFG.samples, 4, table, [prompt] * 3, Letters(), kl_N)]  # type: ignore[arg-type]


def test_rows_of_a_table() -> None:
    """Two of three samples: 0 and 1. The KL of the first is the mean of .5 and .25."""
    shared = {"step": 4, "prompt": "bf", "answer": "7", "finished": True}
    first = {"sample": 0, "response": "db", "length": 2, "reward": 1.0, "rewards": {"rule": 0.5}, "kl": 0.375}
    second = {"sample": 1, "response": "b", "length": 1, "reward": 3.0, "rewards": {"rule": 1.5}, "kl": 0.0}
    assert rows(experience()) == [shared | first, shared | second]


def test_a_sample_without_a_reward_has_none() -> None:
    table = experience()
    table = replace(table, per_sample={**table.per_sample, "reward/rule": torch.tensor([math.nan, 1.5, 0.0])})
    first = rows(table.with_per_sample({"rewarded": torch.tensor([False, True, True])}))[0]
    assert (first["reward"], first["rewards"]) == (None, {"rule": None})
