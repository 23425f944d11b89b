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


@pytest.mark.parametrize("way", [{"surplus": 3}, {"max_refills": 2}])
def test_dynamic_sampling(way, tmp_path) -> None:
    """Two ranks, two slices with a surplus: the scores of 14 samples, of which the first 8 are trained on. Which groups
    have signal is nothing that a rank can know: all choose the same."""
    tree = job_tree("rl", tmp_path)
    tree["reward_model"]["parallel"], tree["algo"] = {}, {"advantage": "group_relative", "dynamic_sampling": way}
    tree["rollout"] |= {"slices": 2 if "surplus" in way else 1}
    tree["rewards"] += [{"kind": "rule", "rule": "exact_match"}]
    options = ("--steps", "1", "--world-size", "2", "--workers", "1")
    options += ("--prompt-lengths", "constant:9", "--response-lengths", "constant:20")
    done = run_command("rl", write_job("rl", tmp_path, tree), tmp_path / "out", *options)
    assert (done.status, done.json()["faults"]) == (0, [])
    drawn = 2 * 14 * 20 if "surplus" in way else 8 * 20  # with slices those of the next step too
    assert [row["tokens"] for row in done.json()["rollouts"]] == [drawn]
    for step in done.json()["times"]:
        assert step["tokens_per_second"] * step["seconds"] == pytest.approx(8 * (9 + 20))
    (note,) = (note for note in done.json()["notes"] if "Dynamic sampling" in note)
    assert f"of {7 if 'surplus' in way else 4} prompts" in note


def test_greedy_responses_in_slices(tmp_path) -> None:
    """ReMax on eight ranks: rewards of 8 samples, and of 4 greedy responses, of which the last rank has none."""
    tree = job_tree("rl", tmp_path)
    del tree["reward_model"], tree["critic"]
    tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "remax"}}
    tree["rollout"] |= {"slices": 2}
    options = ("--steps", "1", "--world-size", "8", "--workers", "1", "--ranks", "7")
    options += ("--prompt-lengths", "constant:9", "--response-lengths", "constant:20")
    done = run_command("rl", write_job("rl", tmp_path, tree), tmp_path / "out", *options)
    assert (done.status, done.json()["faults"]) == (0, [])
    assert [row["tokens"] for row in done.json()["rollouts"]] == [2 * 8 * 20 + 2 * 4 * 20]


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
