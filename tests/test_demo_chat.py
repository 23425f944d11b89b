"""The chat demo as `make demo-chat` runs it, on a small random model with a tokenizer that is trained here.

Ranks that are there already run the stages, but for one that is started as the demo starts it, and killed. What is
asserted is that stages fit together, that a start goes on where the last one ended, and what the report shows. Not
covered: that anything is learnt (`make demo-chat-seeds`).
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from benchmarks.faults.runs import differences, results
from megarlhf.commands.cli import COMMANDS
from megarlhf.config import load_config
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.terminal.progress import make_console
from tests.chat_model import write_chat_model, write_silent_model
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses
from tools.demo_chat.figures import responses
from tools.demo_chat.killed import call_and_kill
from tools.demo_chat.page import side_by_side
from tools.demo_chat.pipeline import GRPO, MODELS, NAMES, PAIRS, PPO, STAGES, TEST, Overrides, Runner
from tools.demo_chat.run import main
from tools.demo_chat.tasks import checks

SMALL = [
    *("data:sft=64", "data:spoiled=8", "data:pairs=12", "data:prompts=16", "data:validation=4", "data:test=4"),
    *("train.mini_batch_samples=8", "train.max_tokens_per_micro_batch=1024"),
    # Enough that some answers end and some do not: pairs are of answers that differ.
    *("sft:train.num_steps=40", "sft:train.mini_batch_samples=16", "sft:actor.optim.lr=1.0e-2", "sft:eval.every=20"),
    *("pairs:rollout.num_samples_per_prompt=8", "pairs:rollout.max_response_tokens=32"),
    *(
        "rm:train.num_steps=3", "rm:train.mini_batch_samples=4", "rm:reward_model.optim.warmup_steps=1",
        "rm:eval.every=3",
    ),
    *(f"{stage}:actor.optim.warmup_steps=1" for stage in ("ppo", "grpo")),
    *(f"{stage}:rollout.max_response_tokens=12" for stage in ("replay", "ppo", "grpo", "answers", "test", "drift")),
    *(f"{stage}:train.prompts_per_step=4" for stage in ("ppo", "grpo")),
    *(f"{stage}:rollout.num_samples_per_prompt=2" for stage in ("ppo", "grpo")),
    *("ppo:train.num_steps=4", "ppo:checkpoint.every=1", "ppo:eval.every=4"),
    *("grpo:train.num_steps=2", "grpo:eval.every=2"),
    *("replay:max_samples=8", "answers:max_samples=5"),
    # Of eight replayed answers of a random model some are empty.
    *(f"{stage}:data.max_skipped=1" for stage in ("sft", "rm", "ppo", "grpo")),
    # The engine that vLLM is compared with: nothing is built for so few tokens.
    *(f"{stage}:rollout.engine=megatron" for stage in ("replay", "answers", "test", "drift")),
]  # fmt: skip


class Warm:
    """Runs a command on a rank that is there already."""

    def __init__(self, ranks: RankPool) -> None:
        self.ranks, self.runs = ranks, list[str]()

    def __call__(self, command: Sequence[str]) -> int:
        assert list(command[:2]) == [sys.executable, "-m"]
        module, *arguments = command[2:]
        assert module == "megarlhf"
        self.runs.append(next(Path(each.partition("=")[2]).name for each in arguments if each.startswith("run.dir=")))
        ((status, written),) = self.ranks.run(1, "command_status", *arguments)
        assert not status, written[-5000:]
        return 0


class KilledInPPO(Warm):
    """A process of its own for PPO, which is killed between its second resume point and its end."""

    def __call__(self, command: Sequence[str]) -> int:
        (run,) = [Path(each.partition("=")[2]) for each in command if each.startswith("run.dir=")] or [None]
        if run is None or run.name != PPO.name:
            return super().__call__(command)
        self.runs.append(run.name)
        return call_and_kill(command, run / "resume/step_000002", seconds=150, log=run.parent / "ppo.log")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory, model, vllm_ranks) -> Path:
    """Started, killed in PPO, started again."""
    root = tmp_path_factory.mktemp("chat") / "demo"
    arguments = ["--root", str(root), "--model", str(model), *SMALL]
    killed, warm = KilledInPPO(vllm_ranks), Warm(vllm_ranks)
    with pytest.raises(SystemExit) as ended:
        main(arguments, killed)
    assert ended.value.code == -signal.SIGKILL
    assert killed.runs == ["replay", "sft", "pairs", "rm", "ppo"]
    assert not (root / "ppo/FINISHED").exists()
    of_killed = json.loads((root / "seconds.json").read_text())["ppo"]
    assert main(arguments, warm) == 0
    evaluations = [f"{what}-{name}" for name in MODELS for what in ("test", "drift")]
    assert warm.runs == ["ppo", "grpo", "answers", *evaluations]
    assert json.loads((root / "seconds.json").read_text())["ppo"] > of_killed > 0, "of both starts"
    return root


def test_a_killed_stage_goes_on_to_the_same_end(demo, model, vllm_ranks) -> None:
    """PPO from its second step on: its metrics, weights and texts are those of a run that nothing happened to."""
    runner = Runner(demo, make_console(), model, overrides=Overrides(tuple(SMALL)), call=Warm(vllm_ranks))
    runner.run(PPO, name="undisturbed")
    assert [row["step"] for row in read_metrics(demo / "ppo")] == [0, 1, 2, 3, 4]
    assert not differences(results(demo / "ppo"), results(demo / "undisturbed"))


def test_what_it_has_reached(demo, model) -> None:
    """The summary by its parts: figures with intervals, differences by hand, and that the engine had the weights."""
    summary = json.loads((demo / "summary.json").read_text())
    assert list(summary["models"]) == list(MODELS) == ["released", "sft", "ppo", "grpo"]
    rows = {name: _lines(demo / f"test-{name}/responses.jsonl") for name in MODELS}
    for name, figures in summary["models"].items():
        assert len(rows[name]) == 8, "two answers to each of four prompts"
        assert len({row["prompt"] for row in rows[name]}) == 4
        for row in rows[name]:
            assert row["rewards"]["tools.demo_chat.tasks:checks"] == pytest.approx(
                checks(row["prompt"], row["response"], row)["score"]
            )
        mean = sum(row["rewards"]["tools.demo_chat.tasks:checks"] for row in rows[name]) / 8
        assert figures["checks that hold"]["value"] == pytest.approx(mean)
        assert figures["answers that are right"]["low"] is not None
    for name, before in (("sft", "released"), ("ppo", "sft"), ("grpo", "sft")):
        found = summary["differences"][f"{name} over {before}"]["checks that hold"]
        means = [summary["models"][each]["checks that hold"]["value"] for each in (name, before)]
        assert found["value"] == pytest.approx(means[0] - means[1])
        assert found["prompts"] == 4
    released = summary["models"]["released"]
    assert released["unrelated answers that are as released"]["value"] == 1.0
    assert 1 < released["perplexity of the released model's answers"]["value"] < 512
    assert "<th>grpo</th>" in (demo / "report.html").read_text()
    for of_run in summary["training"].values():
        assert 0 < of_run["rollout_logprob_gap_max"] < 1e-4
        assert of_run["certificates"] > 0
    assert summary["seed"] == 5
    assert summary["commits"], "of both starts"
    for name, of_checks in summary["checks"].items():
        mean = sum(figure["value"] for figure in of_checks.values()) / 6
        assert mean == pytest.approx(summary["models"][name]["checks that hold"]["value"])
    assert set(summary["seconds"]) >= {"replay", "sft", "pairs", "rm", "ppo", "grpo", "test-grpo", "drift-released"}


def test_sft_also_learns_what_the_released_model_says(demo) -> None:
    """Its answers to other questions than those that show what is forgotten."""
    replay = _lines(demo / "data/replay.jsonl")
    asked = [row["messages"][0]["content"] for row in _lines(demo / "data/replay_questions.jsonl")[:8]]
    assert len(replay) == 8
    for row, question in zip(replay, asked, strict=True):
        assert question in row["prompt"]
    learnt = yaml.safe_load((demo / "sft/config.yaml").read_text())["data"]["train"]
    assert "data/replay.jsonl" in str(learnt)
    assert "data/sft.jsonl" in str(learnt)


def test_another_demo_and_what_was_made_from_an_earlier_stage_are_refused(demo, model, vllm_ranks, capsys) -> None:
    """No stage runs: figures of two seeds, two configurations, or a replaced SFT model would be mixed."""
    warm = Warm(vllm_ranks)
    arguments = ["--root", str(demo), "--model", str(model)]
    for change, names in (
        (["--seed", "1", *SMALL], ["another demo", "seed 5", "now 1", "--root"]),
        ([*SMALL, "grpo:train.num_steps=9"], ["another demo", "overrides"]),
        (["grop:train.num_steps=9"], ["'grop'", ", ".join(NAMES)]),
    ):
        assert main([*arguments, *change], warm) == 2
        assert not missing_names(capsys.readouterr().err, *names)
    finished = demo / "sft/FINISHED"
    before = finished.stat()
    try:
        os.utime(finished)
        assert main([*arguments, *SMALL], warm) == 2
    finally:
        os.utime(finished, ns=(before.st_atime_ns, before.st_mtime_ns))
    message = capsys.readouterr().err
    of_sft = [run for name in MODELS[1:] for run in (f"test-{name}", f"drift-{name}")]
    runs = [demo / run for run in ("pairs", "rm", "ppo", "grpo", *of_sft)]
    assert not missing_names(message, "pairs", "rm", "ppo", "another sft", f"remove {' '.join(map(str, runs))}")
    assert main([*arguments, *SMALL], warm) == 0
    assert not warm.runs


def test_an_actor_that_says_nothing(demo, tmp_path, vllm_ranks) -> None:
    """Answers of the end token alone are drawn, judged, trained on and shown; none can be chosen for a pair."""
    silent = write_silent_model(tmp_path / "silent")
    overrides = Overrides((*SMALL, "pairs:rollout.engine=megatron", "grpo:rollout.engine=megatron"))
    runner = Runner(tmp_path, make_console(), silent, overrides=overrides, call=Warm(vllm_ranks))
    (tmp_path / "data").symlink_to(demo / "data")
    changes = [f"actor.model.path={silent}"]
    runner.run(GRPO, [*changes, "train.num_steps=1", "eval.every=1"])
    before, after = read_metrics(tmp_path / "grpo")
    assert (before["eval_accuracy"], after["eval_accuracy"], after["reward_mean"]) == (0, 0, 0)
    assert (after["finished_fraction"], after["response_length_mean"]) == (1, 1)
    assert all(value is not None for value in after.values()), "every number is finite"
    runner.run(TEST, changes, name="test-silent")
    rows = responses(tmp_path, "test", "silent")
    assert [row["response"] for row in rows] == [""] * 8
    assert all(row["finished"] for row in rows)
    (table,) = side_by_side([], {"silent": rows}, lambda row: "")
    assert table.count("(nothing)") == 8
    command = runner.command(PAIRS, [*changes, f"out={tmp_path / 'pairs.jsonl'}"], "pairs")
    ((status, written),) = vllm_ranks.run(1, "command_status", *command[3:])
    assert status == 2
    assert not missing_names(written, "0 prompts selected", "96 responses empty", "12 prompts without candidate")


def test_data_that_cannot_be_made_leaves_nothing(tmp_path, capsys) -> None:
    """The corrected command is not taken for another demo."""
    root = tmp_path / "demo"
    (tmp_path / "config.json").write_text("{}")
    for wrong, names in (
        ("data:test=5000", ["left to train on"]),
        ("data:tset=4", ["data:tset=4"]),
        ("ppo:algo.clip_hihg=0.3", ["'algo.clip_hihg'", "'clip_high'"]),
        ("--model=nowhere", ["nowhere", "config.json"]),
    ):
        assert main(["--root", str(root), "--model", str(tmp_path), wrong], lambda command: 1) == 2
        assert not missing_names(capsys.readouterr().err, *names)
        assert not root.exists()


def test_a_killed_stage_loses_minutes(tmp_path) -> None:
    """Runs of 5 to 12 minutes have a resume point, which the default of 15 minutes would not give them."""
    runner = Runner(tmp_path, make_console(), tmp_path / "model")
    for stage in (each for each in STAGES if each.command not in ("generate", "eval")):
        command = runner.command(stage, (), stage.name)
        overrides = command[command.index("-c") + 2 :]
        config = load_config(COMMANDS[stage.command].config, stage.config, overrides)
        assert (config.checkpoint.every_minutes, config.run.on_existing) == (3, "resume")
        assert config.checkpoint.keep == 1, "the page says how much disk the points take"


def test_overrides_are_of_one_stage_or_of_those_that_train(tmp_path) -> None:
    overrides = Overrides(("train.num_steps=2", "grpo:algo.kl.coef=0", "test:max_samples=3"))
    assert overrides.of("grpo", trains=True) == ["train.num_steps=2", "algo.kl.coef=0"]
    assert overrides.of("test") == ["max_samples=3"]
    assert overrides.of("answers") == []
    assert Overrides(("rewards=[{kind: rule, rule: 'a:b'}]",)).of("grpo", trains=True)
    for shared, option in (("run.seed=9", "--seed"), ("grpo:run.dir=mine", "--root"), ("run={seed: 9}", "run.key")):
        with refuses(shared, option):
            Overrides((shared,))
    runner = Runner(tmp_path, make_console(), tmp_path / "model")
    assert runner.model_of("released") == tmp_path / "model"
    assert runner.model_of("grpo") == tmp_path / "grpo/checkpoints/latest/actor"


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
