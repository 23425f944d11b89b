"""Accuracy of two runs against the seconds of their steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarlhf.observe.records.jsonl import read_lines
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.records.step_records import LENGTHS_FILE
from megarlhf.observe.watch.phases import SUMS

COPIED = ("response_length_mean", "reward_mean", "kl_k3", "staleness_mean", "staleness_max", "tokens")
"""Metrics of a step that are kept under their names; with whole responses there is no staleness."""
RIGHT = "reward/share/right"
"""Metric: the share of a step's samples, drawn at temperature 1, in which every item is right."""
DIRECTION = "ratio is the seconds in slices over those with whole responses: below 1, slices are there earlier."


def course(run_dir: Path) -> list[dict[str, Any]]:
    """Steps of a run. `seconds` are those of all steps until then, without the start, exports and resume points."""
    longest = {row["step"]: max(row["responses"]) for row in read_lines(run_dir / LENGTHS_FILE)}
    steps, seconds = [], 0.0
    for row in read_metrics(run_dir):
        if row["step"]:
            parts = {name: row[name] for name in SUMS if name in row}
            seconds += sum(parts.values())
            measured = {name: row[name] for name in COPIED if name in row}
            measured |= {"response_length_max": longest[row["step"]], "sampled_accuracy": row[RIGHT]}
            steps.append({"step": row["step"], "seconds": seconds, **parts, **measured})
    return steps


def evaluation(eval_dir: Path, step: int, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy after a step by the figures of `megarlhf eval`, with its 95% interval over prompts."""
    figure = json.loads((eval_dir / "eval.json").read_text())["figures"]["eval_accuracy"]
    seconds = next(each["seconds"] for each in steps if each["step"] == step) if step else 0.0
    return {"step": step, "seconds": seconds, "accuracy": figure["value"], "low": figure["low"], "high": figure["high"]}


def running_means(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Seconds of each evaluation but the first, and the mean of its accuracy and of the one before."""
    return [(after["seconds"], (before["accuracy"] + after["accuracy"]) / 2) for before, after in pairwise(evaluations)]


def seconds_to(evaluations: Sequence[Mapping[str, Any]], accuracy: float) -> float | None:
    """Seconds at which the running mean of two evaluations first is `accuracy`, on straight lines between evaluations;
    None: it never is."""
    means = running_means(evaluations)
    if means and means[0][1] >= accuracy:
        return means[0][0]
    for (start, low), (end, high) in pairwise(means):
        if high >= accuracy:
            return start + (end - start) * (accuracy - low) / (high - low)
    return None


def compare(runs: Mapping[str, Mapping[str, Any]], whole: str, sliced: str) -> dict[str, Any]:
    """Time of both runs to the final accuracy of `whole`, which is the mean of its last two evaluations."""
    final = running_means(runs[whole]["evaluations"])[-1][1]
    reached = {name: seconds_to(run["evaluations"], final) for name, run in runs.items()}
    of_whole, of_sliced = reached[whole], reached[sliced]
    assert of_whole, "its last running mean is the final accuracy"
    return {
        "final_accuracy": final,
        "seconds_to_final_accuracy": reached,
        "ratio": None if of_sliced is None else of_sliced / of_whole,
        "direction": DIRECTION,
    }
