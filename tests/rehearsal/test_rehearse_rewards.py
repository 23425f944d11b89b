"""A rehearsal of rewards that a reward model gives, however they are used: nothing reads what only a run knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal.jobs import job_tree, run_command, write_job

WAYS = {
    "scaled by what the run has seen": ("rewards=[{kind: model, normalise: running}]",),
    "scaled within groups": ("rewards=[{kind: model, normalise: group}]",),
    "bounded, weighted, beside a rule": (
        "rewards=[{kind: model, clip: 2.0, weight: 0.5}, {kind: rule, rule: exact_match, normalise: running}]",
    ),
    "after steps of the critic alone": ("train.critic_warmup_steps=1",),
}


@pytest.mark.parametrize("way", WAYS)
def test_rewards_of_a_model(way: str, tmp_path: Path) -> None:
    tree = job_tree("rl", tmp_path)
    tree["reward_model"]["parallel"] = {}
    done = run_command("rl", write_job("rl", tmp_path, tree), tmp_path / "out", "--workers", "1", *WAYS[way])
    assert done.status == 0
    (rank,) = done.json()["ranks"]
    phases = {(row["step"], row["phase"]) for row in rank["memory"]}
    assert {(2, "train/actor"), (2, "train/critic")} <= phases
    assert ((1, "train/actor") in phases) is ("critic alone" not in way)
