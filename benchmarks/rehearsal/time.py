"""The estimate of time held against real runs, on this machine and with its own hardware file.

An estimate is the replay of all ranks' rehearsals, priced by a file that `megarlhf calibrate` has written here. What is
measured are the same jobs over gloo. All steps of a job do the same; of a phase the fastest step of several runs
counts, from the second step on, on a clock that stands still while the scheduler runs others
(`rehearsal/calibrate/stopwatch.py`). Where two ranks wait for each other, such a pause of one is waiting time of the
other, so a busy machine still makes times of two ranks longer.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.rehearsal.processes import as_ranks, together
from benchmarks.rehearsal.time_cases import TimeCase, job_of
from benchmarks.rehearsal.timed_run import Place, real_rank, rehearsed_rank
from megarlhf.rehearsal.cost_model.hardware import load_hardware
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.timeline.simulate import replay

STEPS = 5
REPEATS = 3
FIRST = 2
"""The first step that counts: optimizer state and caches are there."""
PHASES = ("train/", "optimizer/")
"""What is compared: the training phase. Rollout and rewards are stood in for."""
LEAST_SECONDS = 1e-3
"""A phase that takes less is not compared."""
DIFFERENT = 0.25
"""Layouts that differ by less are not ranked."""


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """One phase of one job, or, of name `step`, all of its phases that are compared."""

    case: TimeCase
    phase: str
    estimate: float
    """Seconds of the slowest rank, as is `measured`."""
    measured: float

    @property
    def error(self) -> float:
        """Estimate / measured - 1."""
        return self.estimate / self.measured - 1


def sft(hidden: int, **given: Any) -> TimeCase:
    return TimeCase(command="sft", hidden=hidden, **given)


def ppo(hidden: int, **given: Any) -> TimeCase:
    return TimeCase(command="ppo", hidden=hidden, **given)


LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"world_size": 2, "parallel": {"tp": 2}},
    {"world_size": 2},
    {"world_size": 2, "parallel": {"pp": 2}},
)
CASES = (
    *(sft(hidden, **layout) for hidden in (128, 256, 512) for layout in LAYOUTS),
    *(sft(1024, layers=2, samples=8, **layout) for layout in LAYOUTS),
    *(sft(512, dtype="bf16", **layout) for layout in LAYOUTS),
    sft(256, packed=False),
    *(ppo(256, **layout) for layout in LAYOUTS),
    ppo(512),
)


def estimate(case: TimeCase, hardware: Path) -> dict[str, float]:
    """Seconds by phase, and of `step`: the median over the steps that count. Raises: ReplayError for a faulty trace."""
    with tempfile.TemporaryDirectory() as directory:
        job = job_of(case, Path(directory), STEPS)
        records = together(rehearsed_rank, [(job, rank, str(hardware)) for rank in range(case.world_size)])
    replayed = replay({r.rank: r.events for r in records}, Pricing(load_hardware(hardware), case.world_size))
    replayed.check()
    steps = []
    for step in replayed.steps:
        if step.step is not None and step.step >= FIRST:
            by_rank = [
                {phase: times.ranks[rank].seconds for phase, times in step.phases.items() if rank in times.ranks}
                for rank in range(case.world_size)
            ]
            steps.append(_of_step(by_rank))
    return {phase: median(step[phase] for step in steps) for phase in steps[0]}


def measure(case: TimeCase, repeats: int = REPEATS) -> dict[str, float]:
    """The same of real runs: the fastest step of each phase."""
    steps = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            ranks: list[dict[Place, tuple[float, float]]] = as_ranks(
                case.world_size, real_rank, job_of(case, Path(directory), STEPS)
            )
        for number in range(FIRST, STEPS + 1):
            steps.append(_of_step([{phase: s[0] for (k, phase), s in rank.items() if k == number} for rank in ranks]))
    return {phase: min(step[phase] for step in steps) for phase in steps[0]}


def _of_step(by_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the slowest rank, each phase that is compared and their sum."""
    kept = [{name: s for name, s in rank.items() if name.startswith(PHASES)} for rank in by_rank]
    names = sorted({name for rank in kept for name in rank})
    seconds = {name: max(rank.get(name, 0.0) for rank in kept) for name in names}
    return {**seconds, "step": max(sum(rank.values()) for rank in kept)}


def compare(cases: Iterable[TimeCase], hardware: Path, repeats: int = REPEATS) -> list[TimeRow]:
    """Rows of every case: its phases, and `step`."""
    rows = []
    for case in cases:
        estimated, measured = estimate(case, hardware), measure(case, repeats)
        rows += [
            TimeRow(case=case, phase=phase, estimate=estimated.get(phase, 0.0), measured=seconds)
            for phase, seconds in measured.items()
            if seconds >= LEAST_SECONDS
        ]
    return rows


def time_error_median(rows: Sequence[TimeRow], phase: str = "step") -> float:
    """The median of the absolute errors of steps."""
    return median(abs(row.error) for row in rows if row.phase == phase)


def ranking(rows: Sequence[TimeRow]) -> tuple[int, int]:
    """Of the pairs of layouts of one size whose measured steps differ by more than `DIFFERENT`: how many the estimate
    ranks as measured, and how many there are."""
    right = pairs = 0
    steps = [row for row in rows if row.phase == "step"]
    for first, second in itertools.combinations(steps, 2):
        slow, fast = max(first.measured, second.measured), min(first.measured, second.measured)
        if first.case.size == second.case.size and slow > fast * (1 + DIFFERENT):
            pairs += 1
            right += (first.estimate > second.estimate) == (first.measured > second.measured)
    return right, pairs


def calibrated(directory: Path) -> Path:
    """A hardware file of this machine, of two ranks."""
    path = directory / "here.yaml"
    command = [sys.executable, "-m", "megarlhf", "calibrate", "-o", str(path), "--nproc", "2"]
    subprocess.run(command, check=True, cwd=ROOT)
    return path


def outcome(cases: Sequence[TimeCase] = CASES) -> dict[str, Any]:
    """For `benchmarks/results/rehearsal.json`: calibrates this machine and compares all cases. Half an hour; what else
    runs on the machine makes it worse, so the load (1 minute's, before and after) stands beside the figures."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        rows = compare(cases, calibrated(Path(directory)))
    right, pairs = ranking(rows)
    by_case: dict[str, Any] = {}
    for row in rows:
        found = {"estimate": row.estimate, "measured": row.measured, "error": row.error}
        by_case.setdefault(row.case.name, {})[row.phase] = found
    return {
        "time_error_median": time_error_median(rows),
        "time_error_max": max(abs(row.error) for row in rows if row.phase == "step"),
        "layouts_ranked_as_measured": right,
        "layouts_compared": pairs,
        "time_load": [before, os.getloadavg()[0]],
        "time": by_case,
    }
