"""What `megarlhf rehearse` says of the demo's stages, beside what their runs have measured.

Memory: the most bytes of tensors that a step itself has allocated and not freed, by phase, of the second step
(`profile.memory_snapshot`). Seconds: of the stage's own run, the median step without the first, against the estimate by
a hardware file that `megarlhf calibrate` writes on this machine.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.records.run_directory import FINISHED_FILE
from megarlhf.observe.watch.phases import SUMS
from megarlhf.observe.watch.profile import CURVE
from tools.demo.pipeline import Stage, run_timed
from tools.demo_chat.pipeline import GRPO, PPO, RM, SFT, Runner

STEP = 2
"""Of which memory is compared: the optimizer's state is there."""
PROFILED = (f"train.num_steps={STEP}", "eval.every=0", f"profile.memory_snapshot={STEP}", "profile.ranks=[0]")


def rehearsed(runner: Runner) -> dict[str, Any]:
    """By stage, each phase's memory and seconds, predicted and measured; after the demo has run under the root."""
    return {stage.name: of_stage(runner, stage) for stage in (SFT, RM, PPO, GRPO)}


def of_stage(runner: Runner, stage: Stage) -> dict[str, Any]:
    """One stage."""
    name = f"profiled-{stage.name}"
    # The rehearsal leaves out the steps that train the critic alone.
    trains_both = ("train.critic_warmup_steps=0",) if stage.command == "rl" else ()
    runner.run(stage, (*PROFILED, *trains_both), name=name)
    told = json.loads(rehearsal(runner, stage).read_text())
    (rank,) = told["ranks"]
    (curve,) = (runner.root / name / "profile").glob("*.memory.json")
    return {
        "memory": beside(predicted_memory(rank["memory"]), measured_memory(json.loads(curve.read_text()))),
        "seconds": beside(predicted_seconds(told["times"], stage), measured_seconds(runner.root / stage.name)),
    }


def rehearsal(runner: Runner, stage: Stage) -> Path:
    """`rehearsal.json` of the stage as it is configured, with the lengths that its run had; made unless it is there."""
    hardware, out = runner.root / "here.yaml", runner.root / "rehearsal" / stage.name
    if not hardware.exists():
        command = [sys.executable, "-m", "megarlhf", "calibrate", "-o", str(hardware), "--nproc", "1"]
        runner.keep_seconds("calibrate", run_timed(runner.console, "calibrate", command, runner.call))
    made, ended = out / "rehearsal.json", runner.root / stage.name / FINISHED_FILE
    if made.exists() and ended.exists() and made.stat().st_mtime < ended.stat().st_mtime:
        shutil.rmtree(out)  # with the lengths of an earlier run
    if not made.exists():
        python, m, module, name, *arguments = runner.command(stage, (), stage.name)
        options = ["--world-size", "1", "--ranks-per-node", "1", "--hardware", str(hardware), "-o", str(out)]
        if stage.command == "rl":
            options += ["--response-lengths", str(runner.root / stage.name)]
        command = [python, m, module, "rehearse", name, *arguments, *options]
        seconds = run_timed(runner.console, f"rehearse {stage.name}", command, runner.call)
        runner.keep_seconds(f"rehearse-{stage.name}", seconds)
    return made


def predicted_memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By phase of the step, bytes above those of its beginning."""
    of_step = [row for row in rows if row["step"] == STEP]
    begin = of_step[0]["start"]
    peaks: dict[str, float] = {}
    for row in of_step:
        peaks[row["phase"]] = max(peaks.get(row["phase"], 0), row["peak"] - begin)
    return peaks


def measured_memory(trace: Mapping[str, Any]) -> dict[str, float]:
    """The same of a run's recorded step."""
    events = trace["traceEvents"]
    curve = [(event["ts"], event["args"]["bytes"]) for event in events if event.get("name") == CURVE]
    peaks: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and "dur" in event:
            begin, end = event["ts"], event["ts"] + event["dur"]
            held = [held for at, held in curve if begin <= at <= end]
            if held:
                peaks[event["name"]] = max(peaks.get(event["name"], 0), *held)
    return peaks


def predicted_seconds(times: Sequence[Mapping[str, Any]], stage: Stage) -> dict[str, float]:
    """By metric, of the last rehearsed step."""
    phases: dict[str, float] = {}
    for phase in times[-1]["phases"]:
        name = phase["phase"].partition("/")[0]
        phases[name] = phases.get(name, 0.0) + phase["seconds"]
    whole = {"seconds": times[-1]["seconds"]}
    if stage.command != "rl":
        return whole
    return whole | {metric: sum(phases.get(name, 0.0) for name in names) for metric, names in SUMS.items()}


def measured_seconds(run: Path) -> dict[str, float]:
    """By metric, the median over steps without the first."""
    rows = [row for row in read_metrics(run) if row["step"] > 1]
    names = [name for name in ("seconds", *SUMS) if name in rows[-1]]
    return {name: median(row[name] for row in rows if name in row) for name in names}


def beside(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """By name in both orders; None where one of the two says nothing."""
    names = [*predicted, *(name for name in measured if name not in predicted)]
    return {name: {"predicted": predicted.get(name), "measured": measured.get(name)} for name in names}
