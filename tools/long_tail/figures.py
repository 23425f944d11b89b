"""What two runs have learnt in which time."""

from __future__ import annotations

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


def course(run_dir: Path) -> dict[str, Any]:
    """Steps and evaluations of a run. `seconds` of both are those of all steps until then, without evaluations, without
    the start and without resume points."""
    longest = {row["step"]: max(row["responses"]) for row in read_lines(run_dir / LENGTHS_FILE)}
    steps, evaluations, seconds = [], [], 0.0
    test: dict[str, Any] = {}
    for row in read_metrics(run_dir):
        parts = {name: row[name] for name in SUMS if name in row}
        seconds += sum(parts.values())
        if row["step"]:
            measured = {name: row[name] for name in COPIED if name in row}
            measured |= {"response_length_max": longest[row["step"]], "sampled_accuracy": row[RIGHT]}
            steps.append({"step": row["step"], "seconds": seconds, **parts, **measured})
        if "eval_accuracy" in row:
            kept = {"accuracy": row["eval_accuracy"], "reward": row["eval_reward_mean"]}
            evaluations.append({"step": row["step"], "seconds": seconds, **kept})
        test |= {name: row[f"test_{name}"] for name in ("accuracy", "reward_mean") if f"test_{name}" in row}
    return {"seconds": seconds, "steps": steps, "evaluations": evaluations, "test": test}


def running_means(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Seconds of each evaluation but the first, and the mean of its accuracy and of the one before."""
    pairs = pairwise(evaluations)
    return [(after["seconds"], (before["accuracy"] + after["accuracy"]) / 2) for before, after in pairs]


def seconds_to(evaluations: Sequence[Mapping[str, Any]], accuracy: float) -> float | None:
    """Seconds at the first evaluation whose running mean of two is at least `accuracy`; None: there is none."""
    return next((seconds for seconds, mean in running_means(evaluations) if mean >= accuracy), None)


def compare(runs: Mapping[str, Mapping[str, Any]], whole: str, sliced: str) -> dict[str, Any]:
    """Time of both runs to the final accuracy of `whole`, which is the mean of its last two evaluations.

    Raises: ValueError for less than two evaluations.
    """
    means = running_means(runs[whole]["evaluations"])
    if not means:
        raise ValueError(f"{whole} has less than two evaluations; lower eval.every, or give more steps")
    final = means[-1][1]
    reached = {name: seconds_to(run["evaluations"], final) for name, run in runs.items()}
    of_whole, of_sliced = reached[whole], reached[sliced]
    assert of_whole, "its last running mean is the final accuracy"
    return {
        "final_accuracy": final,
        "seconds_to_final_accuracy": reached,
        "ratio": None if of_sliced is None else of_sliced / of_whole,
        "direction": DIRECTION,
    }
