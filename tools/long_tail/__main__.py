"""`make demo-long-tail`: accuracy against time with long-tailed responses, drawn whole and in four slices.

A real model learns a task (tools/long_tail/task.py) by SFT and then twice by GRPO: with the same seed and prompts, and
with `rollout.slices` 1 and 4. Of the 24 prompts of every step one has an answer close to the limit, as in a step of
hundreds of samples with lengths as they come. Accuracy is that of held-out prompts, with answers drawn as in training,
on exports of every few steps. Goes on where it was stopped: what has finished is not run again. Writes
benchmarks/results/long_tail.json.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, machine
from megarlhf.commands.cli import COMMANDS
from megarlhf.config import FrozenModel, RLConfig, load_config
from megarlhf.observe.terminal.progress import make_console, table
from megarlhf.resume.points.file_digest import digest_of_directory
from tools.demo.pipeline import Stage, call, write_json
from tools.demo_chat.pipeline import Overrides, Planned, Runner
from tools.demo_chat.run import known_settings
from tools.long_tail import task
from tools.long_tail.figures import compare, course, evaluation
from tools.pretrained import directory

DEMO = "long-tail"
DEFAULT_ROOT = Path("runs") / DEMO
RESULT = ROOT / "benchmarks" / "results" / "long_tail.json"
COMMAND = "make demo-long-tail"
SFT = Stage("sft", "sft", {"data.train": "data/sft.jsonl"}, DEMO)
GRPO = Stage(
    "grpo",
    "rl",
    {
        "actor.model.path": "sft/checkpoints/latest/actor",
        "data.train.0.path": "data/short.jsonl",
        "data.train.1.path": "data/long.jsonl",
    },
    DEMO,
)
TEST = Stage("test", "eval", {"data.train": "data/test.jsonl"}, DEMO)
STAGES = (SFT, GRPO, TEST)
WHOLE, SLICED = "grpo-whole", "grpo-slices"
SLICES = {WHOLE: 1, SLICED: 4}
"""By run: `rollout.slices`, the only difference but for the number of steps."""


def main(argv: Sequence[str] | None = None, call: Callable[[Sequence[str]], int] = call) -> int:
    """Run the stages in order; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.long_tail", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where runs are written")
    parser.add_argument("--out", type=Path, default=RESULT, help="the result file")
    parser.add_argument("--seed", type=int, default=0, help="of data, order and samples")
    parser.add_argument("--model", type=Path, help="another model directory than that of `make pretrained`")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="[STAGE:]section.key=value",
        help="for sft and grpo, or for sft:, grpo: or test: alone",
    )
    options = parser.parse_args(argv)
    try:
        model, overrides = (options.model or directory()).absolute(), Overrides(tuple(options.overrides))
        runner = Runner(options.root, make_console(), model, options.seed, overrides, call, keeps_resume_points=False)
        settings = start(runner)
        for stage, changes, run in planned(runner):
            runner.run(stage, changes, run)
        result = result_of(runner, settings)
    except (ValueError, FileNotFoundError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    write_json(options.out, result)
    show(runner, result)
    runner.console.print(f"wrote {options.out}")
    return 0


def planned(runner: Runner) -> list[Planned]:
    """All runs. Resume points are rare, because writing one takes time from the steps beside it.

    Raises: ValueError for what a stage would refuse, and for exports that are too few.
    """
    rare = "checkpoint.every_minutes=10"
    sft: Planned = (SFT, [rare, f"actor.model.path={runner.model}"], SFT.name)
    trained: list[Planned] = [
        (GRPO, [rare, f"rollout.slices={slices}", f"train.num_steps={exported(runner, run)[-1]}"], run)
        for run, slices in SLICES.items()
    ]
    tests: list[Planned] = [_test(runner, SFT.name, "latest", SFT.name)]
    for run in SLICES:
        tests += [_test(runner, run, f"step_{step:06d}", _name(run, step)) for step in exported(runner, run)]
    return [sft, *trained, *tests]


def _test(runner: Runner, run: str, export: str, name: str) -> Planned:
    path = runner.root / run / "checkpoints" / export / "actor"
    return TEST, [f"actor.model.path={path}"], f"{TEST.name}-{name}"


def _name(run: str, step: int) -> str:
    return f"{run}-{step}"


def exported(runner: Runner, run: str) -> range:
    """Steps of a run of GRPO after which there is an export. The run in slices goes on for two exports more: at the
    last step of the other it may be as good, or a little behind.

    Raises: ValueError for less than two.
    """
    cfg = configuration(runner, GRPO)
    assert isinstance(cfg, RLConfig)
    every, steps = cfg.checkpoint.export_every, cfg.train.num_steps
    if not every or steps % every or steps < 2 * every:
        raise ValueError(
            f"checkpoint.export_every = {every} with train.num_steps = {steps}: accuracy is measured on exports, and "
            "takes two or more, the last after the last step; give a number that divides the steps"
        )
    return range(every, steps + (2 * every if run == SLICED else 0) + 1, every)


def configuration(runner: Runner, stage: Stage, changes: Sequence[str] = ()) -> FrozenModel:
    """As the stage reads it. Raises: ValueError for what it would refuse."""
    command = runner.command(stage, changes, stage.name)
    return load_config(COMMANDS[stage.command].config, stage.config, command[command.index("-c") + 2 :])


def start(runner: Runner) -> dict[str, Any]:
    """Make the data; returns the settings, which are kept under the root.

    Raises: ValueError, before anything is written, for what a stage would refuse and where runs of other settings are
    there.
    """
    names = ("", *(stage.name for stage in STAGES))
    if other := [each for each in runner.overrides.given if _stage_of(each) not in names]:
        raise ValueError(f"{other[0]}: there is no such stage here; name sft, grpo or test, or none for sft and grpo")
    for stage, changes, _ in planned(runner):
        configuration(runner, stage, changes)
    path = runner.root / "settings.json"
    settings = {
        "seed": runner.seed,
        "slices": SLICES,
        "overrides": list(runner.overrides.given),
        "model": runner.model.name,
        "model_sha256": digest_of_directory(runner.model),
        "task_sha256": hashlib.sha256(Path(task.__file__).read_bytes()).hexdigest(),
        **{stage.name: yaml.safe_load((ROOT / stage.config).read_text()) for stage in STAGES},
    }
    known = known_settings(path) or settings
    if changed := [name for name in settings if known.get(name) != settings[name]]:
        was = "; ".join(f"{name} was {known.get(name)}, now {settings[name]}" for name in changed)
        raise ValueError(f"{runner.root} holds runs of other settings ({was}); name another --root, or remove it")
    runner.require_current(planned(runner))
    task.make(runner.root / "data", runner.seed)
    write_json(path, settings)
    return settings


def _stage_of(override: str) -> str:
    """Name before the colon of `STAGE:section.key=value`, or nothing."""
    name, colon, _ = override.partition("=")[0].partition(":")
    return name if colon else ""


def result_of(runner: Runner, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Content of the result file."""
    commits = runner.commits((SFT.name, *SLICES).__contains__)
    runs = {}
    for run, slices in SLICES.items():
        steps = course(runner.root / run)
        tests = {0: SFT.name} | {step: _name(run, step) for step in exported(runner, run)}
        evaluations = [evaluation(runner.root / f"{TEST.name}-{name}", step, steps) for step, name in tests.items()]
        runs[run] = {"slices": slices, "seconds": steps[-1]["seconds"], "evaluations": evaluations, "steps": steps}
    about = machine(COMMAND, commit=", ".join(commits))
    return {**about, "settings": settings, **compare(runs, WHOLE, SLICED), "runs": runs}


def show(runner: Runner, result: Mapping[str, Any]) -> None:
    rows = [
        (run, each["step"], each["seconds"], each["accuracy"])
        for run, of in result["runs"].items()
        for each in of["evaluations"]
    ]
    runner.console.print(table("held-out accuracy", rows, ("run", "step", "seconds of steps", "accuracy")))
    runner.console.print(
        f"final accuracy with whole responses {result['final_accuracy']:.3f}; seconds until then: "
        f"{result['seconds_to_final_accuracy']}; ratio {result['ratio']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
