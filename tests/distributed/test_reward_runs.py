"""Runs with several rewards: a model, functions in worker processes of which one does not always apply, and a server
whose answers fail now and then."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.test_rl_layouts import config
from tests.refuses import command_refuses
from tests.rollout.test_classifier import write_tokenizer
from tests.rollout.test_http_reward import Server


@pytest.fixture
def server() -> Any:
    made = Server()
    yield made
    made.stop()


def command(folder: Path, models: dict[str, Path], data: dict[str, Path], rewards: list[dict[str, Any]]) -> list[str]:
    cfg = config({**models, "other": models["scorer"]}, data["prompts"], {"tp": 2}, advantage="group_relative")
    del cfg["critic"]
    cfg["run"], cfg["rewards"] = {"dir": str(folder / "run")}, rewards
    cfg["train"] |= {"num_steps": 2, "epochs_per_step": 1}
    return argv_of("rl", cfg, folder / "cfg.yaml")


def test_several_rewards_to_the_end_at_tp2(ranks, one_layer, data, tmp_path, server) -> None:
    """The reward is the weighted sum of what each says; the server's failures are tried again and nothing is lost."""
    server.answers = [(503, "busy"), (200, "garbage")]
    shutil.copytree(one_layer["scorer"], tmp_path / "classifier")
    write_tokenizer(tmp_path / "classifier")
    rewards = [
        {"kind": "model", "weight": 0.5},
        {"kind": "rule", "rule": "tests.distributed.user_rewards:sometimes", "name": "sometimes"},
        {"kind": "rule", "rule": "tests.distributed.user_rewards:where", "name": "where"},
        {"kind": "http", "url": server.url, "name": "judge", "weight": 2.0},
        {"kind": "classifier", "path": str(tmp_path / "classifier"), "weight": 0.25, "batch_samples": 3},
    ]
    ranks.run(2, "command", *command(tmp_path, one_layer, data, rewards), "checkpoint.every=2")
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["reward/sometimes_none"], row["reward/sometimes_failed"], row["reward/judge_failed"]) == (8, 0, 0)
        assert (row["reward/judge_mean"], row["reward/judge_std"]) == (1.0, 0.0)
        assert row["reward/where/in_a_worker"] == 1.0
        expected = 0.5 * row["reward/model_mean"] + row["reward/sometimes_mean"] / 2 + 2.0
        expected += 0.25 * row["reward/classifier_mean"]
        assert row["reward/classifier_std"] > 0
        assert row["reward_mean"] == pytest.approx(expected, rel=1e-5)
    assert not server.answers, "the failures have happened"
    (tmp_path / "classifier" / "chat_template.jinja").write_text("another")
    longer = [*command(tmp_path, one_layer, data, rewards), "train.num_steps=3"]
    command_refuses(ranks, longer, "files of the classifier", "changed since", world=2)
    labels = [label for _, _, body in server.requests for label in body["labels"]]
    assert len(labels) >= 32


def test_a_server_that_is_down_ends_the_run_with_status_3_or_samples_are_dropped(
    ranks, one_layer, data, tmp_path, server
) -> None:
    """All ranks alike; what was trained before is saved."""
    server.answers = [(200, json.dumps({"rewards": [1.0] * 8}))] * 2 + [(500, "down")] * 100
    judge = {"kind": "http", "url": server.url, "name": "judge", "retries": 0}
    argv = command(tmp_path, one_layer, data, [judge])
    command_refuses(ranks, argv, "reward 'judge'", "sample", "status 500", "'down'", world=2, status=3)
    (whole,) = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    server.answers = [(500, "down")] * 100
    all_lost = [*command(tmp_path, one_layer, data, [{**judge, "on_failure": "drop"}]), "run.on_existing=overwrite"]
    command_refuses(ranks, all_lost, "Nothing is left to train on", world=2, status=3)
    argv = command(tmp_path, one_layer, data, [judge])
    server.answers = [(200, json.dumps({"rewards": [1.0, None] * 4}))] * 2
    dropped = [*argv, "algo.unrewarded=drop", "run.on_existing=overwrite", "train.num_steps=1"]
    assert ranks.run(2, "command_status", *dropped)[0][0] == 0
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert row["samples_without_reward"] == 8
    # The samples are the same, and equal rewards train little (the KL alone): nothing is counted twice, or as 0.
    assert (row["reward_mean"], row["reward_std"]) == (1.0, 0.0)
    for name in ("entropy", "kl", "response_length_mean", "groups_without_signal"):
        assert row[name] == pytest.approx(whole[name], rel=1e-2, abs=1e-7), name


def test_generated_tasks_with_their_verifier_to_the_end_at_tp2(ranks, one_layer, data, tmp_path) -> None:
    """Data and reward are one line each; beside them the answer as mathematics, and the accuracy by the verifier."""
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    rules = [{"kind": "rule", "rule": "reasoning_gym"}, {"kind": "rule", "rule": "math_verify", "weight": 0.5}]
    task = "reasoning_gym:chain_sum?max_terms=2&max_digits=1&min_digits=1"
    argv = [
        *command(tmp_path, one_layer, data, rules), f"data.train={task}&size=16&seed=0",
        f"data.validation={task}&size=300&seed=16", "data.max_prompt_tokens=200", "eval.accuracy=reasoning_gym",
        "eval.max_samples=8", "train.num_steps=1",
    ]  # fmt: skip
    ranks.run(2, "command", *argv)
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert row["reward/math_verify/no_answer"] + row["reward/math_verify/score"] <= 1.0
    expected = row["reward/reasoning_gym_mean"] + 0.5 * row["reward/math_verify_mean"]
    assert row["reward_mean"] == pytest.approx(expected, rel=1e-5)
    assert "eval_accuracy" in row
