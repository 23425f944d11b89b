"""A rehearsal of rewards that a reward model gives, however they are used: nothing reads what only a run knows."""

import pytest

from tests.rehearsal.jobs import job_tree, run_command, write_job

WAYS = {
    "scaled by what the run has seen": ("rewards=[{kind: model, normalise: running}]",),
    "scaled within groups": ("rewards=[{kind: model, normalise: group}]",),
    "bounded, weighted, beside a rule": (
        "rewards=[{kind: model, clip: 2.0, weight: 0.5}, {kind: rule, rule: exact_match, normalise: running}]",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_rewards_of_a_model(way, tmp_path) -> None:
    tree = job_tree("rl", tmp_path)
    tree["reward_model"]["parallel"] = {}
    done = run_command("rl", write_job("rl", tmp_path, tree), tmp_path / "out", "--workers", "1", *WAYS[way])
    assert done.status == 0
    (rank,) = done.json()["ranks"]
    phases = {(row["step"], row["phase"]) for row in rank["memory"]}
    assert {(2, "train/actor"), (2, "train/critic")} <= phases


def test_steps_of_the_critic_alone_are_left_out(tmp_path) -> None:
    """They need less memory and time than those after them, of which the rehearsal is to speak."""
    whole = {}
    for waits in (0, 3):
        folder = tmp_path / str(waits)
        folder.mkdir()
        changes = ("train.num_steps=4", f"train.critic_warmup_steps={waits}")
        tree = job_tree("rl", folder)
        tree["reward_model"]["parallel"] = {}
        done = run_command("rl", write_job("rl", folder, tree), folder / "out", "--workers", "1", *changes)
        assert done.status == 0
        (rank, *_) = done.json()["ranks"]
        whole[waits] = [(row["step"], row["phase"], row["peak"]) for row in rank["memory"]]
        assert any("3 steps" in note and "critic alone" in note for note in done.json()["notes"]) is bool(waits)
    assert whole[3] == whole[0]
