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
from tests.refuses import missing_names
from tools.demo_chat.pipeline import Runner
from tools.long_tail.__main__ import GRPO, SLICED, SLICES, TEST, WHOLE, main, planned
from tools.long_tail.figures import compare, course, evaluation, seconds_to
from tools.long_tail.task import FORGOTTEN, SIZES, Task, make, right, share

FIELDS = {"first": 36, "last": 41}
SMALL = [
    *("sft:train.num_steps=2", "sft:train.mini_batch_samples=2", "sft:actor.optim.warmup_steps=1"),
    *("grpo:train.num_steps=6", "grpo:rollout.max_response_tokens=12", "grpo:checkpoint.export_every=3"),
    *("test:max_samples=4", "grpo:train.prompts_per_step=4", "grpo:train.mini_batch_samples=8"),
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
    assert max(counts["test"]) <= 18
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
    for name in ("short", "long", "test"):
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
        assert stage is TEST or not without_effect(loaded[run])
    assert loaded["sft"].data.train[0].path == tmp_path / "data/sft.jsonl"
    whole, sliced = loaded[WHOLE], loaded[SLICED]
    assert (whole.rollout.slices, sliced.rollout.slices) == (1, 4)
    assert whole.rollout.max_response_tokens % 4 == 0
    assert whole.data.train[1].path == tmp_path / "data/long.jsonl"
    assert (whole.train.num_steps, sliced.train.num_steps) == (24, 32)
    assert sliced.train.model_copy(update={"num_steps": 24}) == whole.train
    same = {"run": whole.run, "rollout": whole.rollout, "train": whole.train}
    assert sliced.model_copy(update=same) == whole
    assert sliced.run.model_copy(update={"dir": whole.run.dir}) == whole.run
    rl_batch_numbers(whole, 1)
    assert whole.updates_per_step == 1, "staleness is that of slices alone"
    tested = {run: cfg.actor.model.path.relative_to(tmp_path) for run, cfg in loaded.items() if run.startswith("test-")}
    last = {WHOLE: 24, SLICED: 32}
    exports = [(run, step) for run in SLICES for step in range(4, last[run] + 1, 4)]
    paths = {f"test-{run}-{step}": Path(run, f"checkpoints/step_{step:06d}/actor") for run, step in exports}
    assert tested == {"test-sft": Path("sft/checkpoints/latest/actor"), **paths}
    assert loaded["test-sft"].rollout.temperature == whole.rollout.temperature


def test_each_step_has_one_long_prompt_and_none_comes_twice():
    cfg = load_config(RLConfig, GRPO.config, ["train.num_steps=32"])
    sizes = (SIZES["short"], SIZES["long"])
    for seed in (0, 1):
        order = MixedBatches(sizes, [each.weight for each in cfg.data.train], cfg.train.prompts_per_step, seed)
        steps = [order.indices(step) for step in range(cfg.train.num_steps)]
        assert [sum(index >= sizes[0] for index in step) for step in steps] == [1] * cfg.train.num_steps
        assert len({index for step in steps for index in step}) == cfg.train.num_steps * cfg.train.prompts_per_step


def test_time_to_accuracy_by_hand():
    """Whole: running means .3, .5, .55, .6 at 10 to 40 s; final .6, at 40 s. In slices .35, .55, .65 at 5, 10, 15 s: .6
    is half-way between the last two, at 12.5 s."""

    def run(accuracies, seconds):
        pairs = enumerate(accuracies)
        return {"evaluations": [{"step": n, "seconds": n * seconds, "accuracy": each} for n, each in pairs]}

    runs = {"whole": run((0.2, 0.4, 0.6, 0.5, 0.7), 10), "slices": run((0.2, 0.5, 0.6, 0.7, 0.1), 5)}
    assert seconds_to(runs["whole"]["evaluations"], 0.4) == pytest.approx(15)
    assert seconds_to(runs["whole"]["evaluations"], 0.2) == 10
    assert seconds_to(runs["whole"]["evaluations"], 0.7) is None
    found = compare(runs, "whole", "slices")
    assert found["final_accuracy"] == pytest.approx(0.6)
    assert found["seconds_to_final_accuracy"] == pytest.approx({"whole": 40, "slices": 12.5})
    assert found["ratio"] == pytest.approx(12.5 / 40)
    runs["slices"] = run((0.2, 0.5, 0.6, 0.5), 5)
    assert compare(runs, "whole", "slices")["ratio"] is None


def test_seconds_are_those_of_steps_alone(tmp_path):
    step = {"response_length_mean": 2, "reward_mean": 0.5, "kl_k3": 0.1, "tokens": 4, "reward/share/right": 0.5}
    rows = [
        {"step": 0, "wall_clock": 100},
        {"step": 1, "seconds_rollout": 3, "seconds_train": 2, "seconds_checkpoint": 50, "wall_clock": 900, **step},
        {"step": 2, "seconds_rollout": 4, "seconds_reshard": 1, **step},
    ]
    lengths = [{"step": n, "prompts": [1, 1], "responses": [n, 9 * n]} for n in (1, 2)]
    for name, lines in (("metrics", rows), ("lengths", lengths)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    steps = course(tmp_path)
    assert [each["seconds"] for each in steps] == [5, 10]
    assert [each["response_length_max"] for each in steps] == [9, 18]
    accuracy = {"value": 0.5, "low": 0.25, "high": 0.75, "over": "4 prompts"}
    (tmp_path / "eval.json").write_text(json.dumps({"figures": {"eval_accuracy": accuracy}}))
    of_step = {"accuracy": 0.5, "low": 0.25, "high": 0.75}
    assert evaluation(tmp_path, 2, steps) == {"step": 2, "seconds": 10, **of_step}
    assert evaluation(tmp_path, 0, steps) == {"step": 0, "seconds": 0, **of_step}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (["data:test=4"], ["data:test=4", "sft, grpo or test"]),
        (["grpo:train.num_steps=27"], ["export_every = 4", "num_steps = 27"]),
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
    for more, status in (([], 0), ([], 0), (["grpo:train.num_steps=9"], 2)):
        done = subprocess.run(
            [*command, *more], cwd=ROOT, env=outside_a_run(), capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout[-5000:] + done.stderr[-5000:]
        ends.append({path: path.stat().st_mtime_ns for path in tmp_path.glob(f"runs/*/{FINISHED_FILE}")})
    assert not missing_names(done.stderr, "other settings", "--root")
    assert len(ends[0]) == 10, "of SFT, two of GRPO, and the tests of seven models"
    assert ends == [ends[0]] * 3
    result = json.loads(out.read_text())
    assert result["commit"]
    assert result["settings"]["grpo"]["rollout"]["num_samples_per_prompt"] == 2
    assert set(result["runs"]) == set(result["seconds_to_final_accuracy"]) == {WHOLE, SLICED}
    for name, last in ((WHOLE, 6), (SLICED, 12)):
        run = result["runs"][name]
        assert [each["step"] for each in run["steps"]] == list(range(1, last + 1))
        assert [each["step"] for each in run["evaluations"]] == list(range(0, last + 1, 3))
        assert all(before["seconds"] < after["seconds"] for before, after in pairwise(run["steps"]))
        assert run["evaluations"][-1]["seconds"] == run["steps"][-1]["seconds"] == run["seconds"]
        assert max(each["response_length_max"] for each in run["steps"]) == 12
    staleness = {run: [each.get("staleness_max", 0) for each in of["steps"]] for run, of in result["runs"].items()}
    assert staleness == {WHOLE: [0] * 6, SLICED: [0, 1, 2, *[3] * 9]}
