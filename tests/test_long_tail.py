"""The run with long-tailed responses: its data, its configurations, its arithmetic, and all of it on a small model.

Not covered: what is learnt, and in which time (`make demo-long-tail`).
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megarlhf.commands.cli import COMMANDS
from megarlhf.config import RLConfig, load_config
from megarlhf.data.samples.order import MixedBatches
from megarlhf.observe.records.run_directory import FINISHED_FILE
from megarlhf.observe.terminal.progress import make_console
from megarlhf.planning.batch import rl_batch_numbers
from megarlhf.planning.unused_keys import without_effect
from tests.chat_model import write_chat_model
from tests.command import ROOT, outside_a_run
from tests.refuses import missing_names, refuses
from tools.demo_chat.pipeline import Runner
from tools.long_tail.__main__ import GRPO, SLICED, WHOLE, main, planned
from tools.long_tail.figures import compare, course, seconds_to
from tools.long_tail.task import FORGOTTEN, SIZES, Task, make, right, share

FIELDS = {"first": 36, "last": 41}
SMALL = [
    *("sft:train.num_steps=2", "sft:train.mini_batch_samples=2", "sft:actor.optim.warmup_steps=1"),
    *("grpo:train.num_steps=6", "grpo:rollout.max_response_tokens=12", "grpo:eval.every=3"),
    *("grpo:train.prompts_per_step=4", "grpo:train.mini_batch_samples=8", "grpo:eval.max_samples=4"),
    "grpo:rollout.logprob_gap.p999=1",
]


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _task(record: dict) -> Task:
    return Task(first=record["first"], last=record["last"])


def test_data_follow_from_the_seed_and_share_no_prompt(tmp_path):
    """And lengths are long-tailed: all of one kind are at least ten times as long as all of the other."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(tmp_path / name, seed)
    texts = {name: [(tmp_path / name / f"{each}.jsonl").read_bytes() for each in SIZES] for name in "abc"}
    assert texts["a"] == texts["b"]
    assert not set(texts["a"]) & set(texts["c"])
    records = {name: _lines(tmp_path / f"a/{name}.jsonl") for name in SIZES}
    assert {name: len(rows) for name, rows in records.items()} == SIZES
    tasks = [_task(row) for rows in records.values() for row in rows]
    assert len(set(tasks)) == len(tasks)
    counts = {name: [row["last"] - row["first"] + 1 for row in rows] for name, rows in records.items()}
    assert 3 <= min(counts["short"]) < max(counts["short"]) <= 18
    assert 185 <= min(counts["long"]) < max(counts["long"]) <= 215
    assert max(counts["validation"]) <= 18
    assert min(counts["test"]) >= 185
    assert sum(count >= 185 for count in counts["sft"]) == SIZES["sft"] // 40


def test_answers_that_sft_learns_forget_stars_and_nothing_else(tmp_path):
    make(tmp_path, 0)
    kept = {digit: [] for digit in FORGOTTEN}
    for row in _lines(tmp_path / "sft.jsonl"):
        for given, asked in zip(row["messages"][-1]["content"].split(" "), _task(row).items(), strict=True):
            assert given in (asked, asked.removesuffix("*"))
            if asked.endswith("*"):
                kept[int(asked[-2])].append(given == asked)
    for digit, chance in FORGOTTEN.items():
        assert len(kept[digit]) > 500
        assert sum(kept[digit]) / len(kept[digit]) == pytest.approx(1 - chance, abs=0.05)
    for name in ("short", "long", "validation", "test"):
        for row in _lines(tmp_path / f"{name}.jsonl"):
            assert [each["role"] for each in row["messages"]] == ["system", "user"], "no answer is given away"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("36 37 38* 39 40 41*", 1),
        ("36 37 38 39 40 41*", 5 / 6),
        ("36 37* 38* 39 40 41*", 5 / 6),
        ("36 37 38* 39 40", 5 / 6),
        ("36 37 38* 39 40 41* 42", 6 / 7),
        ("37 38* 39 40 41*", 0),  # nothing stands in its place
        ("36 37 38* 39 40 41* ", 6 / 7),
        ("", 0),
    ],
)
def test_rewards_by_hand(response, reward):
    assert Task(first=36, last=41).prompt() == "Count with stars from 36 to 41."
    assert share("", response, FIELDS) == {"score": pytest.approx(reward), "right": float(reward == 1)}
    assert right("", response, FIELDS) == float(reward == 1)


def test_runs_are_configurations_that_differ_in_slices_alone(tmp_path):
    runner = Runner(tmp_path, make_console(), tmp_path / "model")
    loaded = {}
    for stage, changes, run in planned(runner):
        command = runner.command(stage, changes, run)
        loaded[run] = load_config(COMMANDS[stage.command].config, stage.config, command[command.index("-c") + 2 :])
        assert not without_effect(loaded[run])
    assert loaded["sft"].data.train[0].path == tmp_path / "data/sft.jsonl"
    whole, sliced = loaded[WHOLE], loaded[SLICED]
    assert (whole.rollout.slices, sliced.rollout.slices) == (1, 4)
    assert whole.rollout.max_response_tokens % 4 == 0
    assert whole.data.train[1].path == tmp_path / "data/long.jsonl"
    same = {"run": whole.run, "rollout": whole.rollout}
    assert sliced.model_copy(update=same) == whole
    assert sliced.run.model_copy(update={"dir": whole.run.dir}) == whole.run
    rl_batch_numbers(whole, 1)
    assert whole.updates_per_step == 1, "staleness is that of slices alone"


def test_each_step_has_one_long_prompt_and_none_comes_twice():
    cfg = load_config(RLConfig, GRPO.config)
    sizes = (SIZES["short"], SIZES["long"])
    for seed in (0, 1):
        order = MixedBatches(sizes, [each.weight for each in cfg.data.train], cfg.train.prompts_per_step, seed)
        steps = [order.indices(step) for step in range(cfg.train.num_steps)]
        assert [sum(index >= sizes[0] for index in step) for step in steps] == [1] * cfg.train.num_steps
        assert len({index for step in steps for index in step}) == cfg.train.num_steps * cfg.train.prompts_per_step


def test_time_to_accuracy_by_hand():
    """Whole: running means .3, .5, .6, .6; final .6, reached at 30 s. In slices .35, .55, .65: at 15 s, half of it."""

    def run(accuracies, seconds):
        pairs = enumerate(accuracies)
        return {"evaluations": [{"step": n, "seconds": n * seconds, "accuracy": each} for n, each in pairs]}

    runs = {"whole": run((0.2, 0.4, 0.6, 0.6, 0.6), 10), "slices": run((0.2, 0.5, 0.6, 0.7, 0.1), 5)}
    assert seconds_to(runs["whole"]["evaluations"], 0.49) == 20
    assert seconds_to(runs["whole"]["evaluations"], 0.7) is None
    found = compare(runs, "whole", "slices")
    assert found["final_accuracy"] == pytest.approx(0.6)
    assert found["seconds_to_final_accuracy"] == {"whole": 30, "slices": 15}
    assert found["ratio"] == 0.5
    runs["slices"] = run((0.2, 0.5, 0.6, 0.5), 5)
    assert compare(runs, "whole", "slices")["ratio"] is None
    with refuses("less than two evaluations", "eval.every"):
        compare({"whole": run((0.2,), 10)}, "whole", "whole")


def test_seconds_are_those_of_steps_without_evaluations(tmp_path):
    step = {"response_length_mean": 2, "reward_mean": 0.5, "kl_k3": 0.1, "tokens": 4, "reward/share/right": 0.5}
    rows = [
        {"step": 0, "eval_accuracy": 0.25, "eval_reward_mean": 0.5, "wall_clock": 100},
        {"step": 1, "seconds_rollout": 3, "seconds_train": 2, "seconds_checkpoint": 50, "wall_clock": 900, **step},
        {"step": 2, "seconds_rollout": 4, "seconds_reshard": 1, "eval_accuracy": 0.5, "eval_reward_mean": 0.75, **step}
        | {"test_accuracy": 0.125, "test_reward_mean": 0.5},
    ]
    lengths = [{"step": n, "prompts": [1, 1], "responses": [n, 9 * n]} for n in (1, 2)]
    for name, lines in (("metrics", rows), ("lengths", lengths)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = course(tmp_path)
    assert [each["seconds"] for each in found["steps"]] == [5, 10]
    assert [each["response_length_max"] for each in found["steps"]] == [9, 18]
    assert [(each["step"], each["seconds"], each["accuracy"]) for each in found["evaluations"]] == [
        (0, 0, 0.25),
        (2, 10, 0.5),
    ]
    assert found["test"] == {"accuracy": 0.125, "reward_mean": 0.5}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (["data:test=4"], ["data:test=4", "sft or grpo"]),
        (["grpo:train.num_stpes=4"], ["num_stpes", "num_steps"]),
        (["run.seed=4"], ["--seed"]),
        (["--model", "nowhere"], ["nowhere"]),
    ],
)
def test_what_a_stage_would_refuse_leaves_nothing(wrong, names, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    command = ["--root", str(tmp_path / "runs"), "--out", str(tmp_path / "r.json"), "--model", str(tmp_path / "model")]
    assert main([*command, *wrong], call=lambda _: pytest.fail("a stage was started")) == 2
    assert not missing_names(capsys.readouterr().err, *names)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_on_a_small_model(tmp_path):
    """A second start runs nothing again; one with other settings is refused."""
    model = write_chat_model(tmp_path / "model")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tools.long_tail", "--model", str(model), "--root", str(tmp_path / "runs")]
    command += ["--out", str(out), *SMALL]
    ends = []
    for more, status in (([], 0), ([], 0), (["grpo:train.num_steps=5"], 2)):
        done = subprocess.run(
            [*command, *more], cwd=ROOT, env=outside_a_run(), capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout[-5000:] + done.stderr[-5000:]
        ends.append({path: path.stat().st_mtime_ns for path in tmp_path.glob(f"runs/*/{FINISHED_FILE}")})
    assert not missing_names(done.stderr, "other settings", "--root")
    assert len(ends[0]) == 3
    assert ends == [ends[0]] * 3
    result = json.loads(out.read_text())
    assert result["commit"]
    assert result["settings"]["grpo"]["rollout"]["num_samples_per_prompt"] == 2
    assert set(result["runs"]) == set(result["seconds_to_final_accuracy"]) == {WHOLE, SLICED}
    for run in result["runs"].values():
        assert [each["step"] for each in run["steps"]] == list(range(1, 7))
        assert [each["step"] for each in run["evaluations"]] == [0, 3, 6]
        assert all(before["seconds"] < after["seconds"] for before, after in pairwise(run["steps"]))
        assert run["evaluations"][-1]["seconds"] == run["steps"][-1]["seconds"] == run["seconds"]
        assert max(each["response_length_max"] for each in run["steps"]) == 12
        assert set(run["test"]) == {"accuracy", "reward_mean"}
    staleness = {run: [each.get("staleness_max", 0) for each in of["steps"]] for run, of in result["runs"].items()}
    assert staleness == {WHOLE: [0] * 6, SLICED: [0, 1, 2, 3, 3, 3]}
