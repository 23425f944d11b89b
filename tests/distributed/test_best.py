"""The best checkpoint by a held-out metric, and an end by patience, in whole runs that are cut off and resumed.

Not covered: which step is the best (tests/trainers/test_best_checkpoint.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_rl_layouts import config as rl_config
from tests.refuses import command_refuses, missing_names

BOUNDARY = ("megarlhf.resume.points.checkpointer:Checkpointer", "boundary_reached")
EXPORTS = ("megarlhf.trainers.run.exports:Exports", "maybe_write")


@pytest.fixture
def files(one_layer, data, tmp_path) -> dict[str, list[str]]:
    """Command lines by command; the learning rate is so high that held-out figures rise and fall."""
    role = {"model": {"path": str(one_layer["plain"])}, "optim": {"lr": 0.03}}
    held_out = {name: str(tmp_path / f"held_out_{name}.jsonl") for name in ("sft", "pairs")}
    for name, path in held_out.items():
        Path(path).write_text("".join(data[name].read_text().splitlines(keepends=True)[:6]))
    common = {
        "train": {"num_steps": 8, "mini_batch_samples": 16, "micro_batch_samples": 8},
        "eval": {"every": 1},
        "checkpoint": {"every": 2, "every_minutes": 0, "keep": 1, "background": False},
    }
    trees: dict[str, dict[str, Any]] = {
        "sft": {"actor": role, "data": {"train": str(data["sft"]), "validation": held_out["sft"]}},
        "rm": {"reward_model": role, "data": {"train": str(data["pairs"]), "validation": held_out["pairs"]}},
        "dpo": {"actor": role, "data": {"train": str(data["pairs"]), "validation": held_out["pairs"]}},
    }
    lines = {}
    for command, tree in trees.items():
        lines[command] = argv_of(command, {"run": {"dir": "set below"}, **common, **tree}, tmp_path / f"{command}.yaml")
    return lines


def exports(run: Path) -> tuple[set[str], str]:
    """Steps that are exported, and the one that is the best."""
    root = run / "checkpoints"
    return {path.name for path in root.glob("step_*") if not path.is_symlink()}, (root / "best").readlink().name


@pytest.mark.parametrize(
    ("command", "metric", "choose"),
    [("sft", "eval_loss", min), ("rm", "eval_pair_accuracy", max), ("dpo", "eval_reward_margin", max)],
)
def test_best_is_the_step_of_the_best_held_out_figure_over_kills(
    command, metric, choose, files, ranks, tmp_path
) -> None:
    """Killed before the export of every step, and before the point after it: the same links and exports as a run that
    nobody killed, and its own weights."""
    best = f"checkpoint.best={{metric: {metric}}}"
    argv = [*files[command], best, "checkpoint.export_every=5", "checkpoint.export_keep=1"]
    whole = tmp_path / "whole"
    ranks.run(1, "command", *argv, f"run.dir={whole}")
    rows = read_metrics(whole)
    values = {row["step"]: row[metric] for row in rows if row["step"]}
    assert len(values) == 8
    best = next(step for step, value in values.items() if value == choose(values.values()))
    kept, link = exports(whole)
    assert link == f"step_{best:06d}"
    assert kept == {link, "step_000008"}
    killed = tmp_path / "killed"
    line = [*argv, f"run.dir={killed}"]
    for calls, (owner, method) in ((3, EXPORTS), (2, EXPORTS), (6, BOUNDARY), (4, EXPORTS)):
        outcome, _ = ranks.run(1, command_until, calls, owner, method, *line)[0]
        assert outcome == "killed"
        if (killed / "checkpoints" / "best").is_symlink():
            assert (killed / "checkpoints" / "best").exists(), "a link that leads nowhere"
    ranks.run(1, "command", *line)
    assert exports(killed) == exports(whole)
    for name in kept:
        (role,) = (whole / "checkpoints" / name).iterdir()
        for path in role.glob("*.safetensors"):
            assert (killed / "checkpoints" / name / role.name / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_a_run_ends_by_patience_and_a_killed_one_at_the_same_step(command, files, ranks, tmp_path) -> None:
    """No rise counts as better by more than 100; so the second evaluation after the first step is the last."""
    argv = [*files[command], "train.stop={patience: 3, min_change: 100}"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    (said,) = ranks.run(1, "command", *argv, f"run.dir={whole}")
    assert not missing_names(said, "stopped", "eval_loss", "3 evaluations")
    finished = json.loads((whole / "FINISHED").read_text())
    assert (finished["step"], [row["step"] for row in read_metrics(whole)]) == (3, [0, 1, 2, 3])
    assert (whole / "checkpoints" / "latest").readlink().name == "step_000003"
    outcome, _ = ranks.run(1, command_until, 6, *BOUNDARY, *argv, f"run.dir={killed}")[0]
    assert outcome == "killed"
    assert not (killed / "FINISHED").exists()
    (said,) = ranks.run(1, "command", *argv, f"run.dir={killed}")
    assert "from resume/step_000002" in said
    again = json.loads((killed / "FINISHED").read_text())
    assert (again["step"], again["reason"]) == (finished["step"], finished["reason"])
    command_refuses(ranks, [*argv, f"run.dir={killed}", "train.num_steps=9"], "change train.stop")


def test_test_data_gives_figures_after_the_last_step_only(files, ranks, data, tmp_path) -> None:
    """Those of `megarlhf eval` on the export, and no choice sees them: the validation figures are as without them."""
    tests = {}
    for name in ("sft", "pairs"):
        tests[name] = tmp_path / f"test_{name}.jsonl"
        tests[name].write_text("".join(data[name].read_text().splitlines(keepends=True)[20:30]))
    for command, figures in (("sft", ["loss", "perplexity"]), ("rm", ["loss", "pair_accuracy", "calibration_error"])):
        argv, test = [*files[command], "train.num_steps=3"], tests["sft" if command == "sft" else "pairs"]
        run, plain = tmp_path / command, tmp_path / f"plain_{command}"
        ranks.run(1, "command", *argv, f"run.dir={run}", f"data.test={test}")
        ranks.run(1, "command", *argv, f"run.dir={plain}")
        rows = [reproducible(row) for row in read_metrics(run)]
        assert [any(name.startswith("test_") for name in row) for row in rows] == [False, False, False, True]
        without = [{k: v for k, v in row.items() if not k.startswith("test_")} for row in rows]
        assert without == [reproducible(row) for row in read_metrics(plain)]
        role = "actor" if command == "sft" else "reward_model"
        tree = {"run": {"dir": str(tmp_path / f"eval_{command}")}, "data": {"train": str(test)}}
        tree[role] = {"model": {"path": str(run / "checkpoints" / "latest" / role)}}
        ranks.run(1, "command", *argv_of("eval", tree, tmp_path / "eval.yaml"))
        (measured,) = read_metrics(tmp_path / f"eval_{command}")
        for figure in figures:
            assert rows[-1][f"test_{figure}"] == pytest.approx(measured[f"eval_{figure}"], abs=2e-5), figure
            assert rows[-1][f"test_{figure}"] != rows[-1][f"eval_{figure}"], figure


def test_rl_keeps_the_best_of_its_held_out_reward(ranks, one_layer, data, tmp_path) -> None:
    tree = rl_config({**one_layer, "other": one_layer["scorer"]}, data["prompts"], {}, advantage="group_relative")
    tree["train"] |= {"num_steps": 3}
    tree["data"]["validation"] = str(data["prompts"])
    test = tmp_path / "test.jsonl"
    test.write_text("".join(data["prompts"].read_text().splitlines(keepends=True)[:5]).replace("=", "= "))
    tree["data"]["test"] = str(test)
    tree |= {"eval": {"every": 1, "max_samples": 4}, "run": {"dir": str(tmp_path / "run")}}
    tree["checkpoint"] = {"every": 1, "every_minutes": 0, "best": {"metric": "eval_reward_mean"}}
    tree["actor"]["optim"] = {"lr": 0.01}
    argv = argv_of("rl", tree, tmp_path / "rl.yaml")
    assert ranks.run(1, command_until, 2, *EXPORTS, *argv)[0][0] == "killed"
    ranks.run(1, "command", *argv)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "test_reward_mean" in row] == [3]
    values = {row["step"]: row["eval_reward_mean"] for row in rows if row["step"]}
    assert len(set(values.values())) > 1
    best = max(values, key=lambda step: (values[step], -step))
    kept, link = exports(tmp_path / "run")
    assert (kept, link) == ({f"step_{best:06d}", "step_000003"}, f"step_{best:06d}")
