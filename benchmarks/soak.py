"""Growth of a long run: python -m benchmarks.soak (`make test-soak`).

Short steps of `rl` (GRPO with vLLM, a reward process, resume points, tables, evaluations) and of `sft` run with small
models. Another process measures the run every second: resident memory, threads and open files of its lasting processes,
files and bytes in /dev/shm and in the temporary directory, and the run directory without its records. Records get a
line a step, as they have to; their bytes a step are reported.

From step 200 on the medians of blocks of steps are compared with a straight line (least squares). A quantity grows if
its slope is more than three standard errors above zero and, over the whole run, more than the resolution of the
quantity. Growth fails the command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.processes import Command
from benchmarks.faults.runs import Case, Site
from benchmarks.machine import ROOT, machine

RESULT = ROOT / "benchmarks" / "results" / "soak.json"
RECORDS = ("metrics.jsonl", "lengths.jsonl", "samples", "tensorboard")
"""Files of a run directory, and folders, that get a line, or a table, for each step or evaluation."""
LASTING_SECONDS = 5.0
"""Age from which a process counts. The writer of a resume point lives shorter."""
RESOLUTION = {"memory_mb": 8.0, "shm_mb": 0.5, "temporary_mb": 0.5, "run_mb": 0.2}
"""Growth over the run, in units of the quantity, below which it is none; 0.5 for counts. Memory: gaps inside the heap
fill for 2,000 steps, by up to 7 MB, and then stay."""


@dataclass(frozen=True)
class Growth:
    """Change of a quantity from step `first` to step `last`."""

    at_first: float
    at_last: float
    per_1000_steps: float
    error_per_1000_steps: float
    """Standard error of the slope."""
    grows: bool


def measure(command: Command, shm_before: frozenset[str], temporary: Path, run: Path) -> dict[str, float]:
    """Sizes of a run at this moment."""
    processes = [psutil.Process(command.pid)]
    processes += processes[0].children(recursive=True)
    memory, threads, files = 0, 0, 0
    for process in processes:
        try:
            if time.time() - process.create_time() < LASTING_SECONDS:
                continue
            memory += process.memory_info().rss
            threads += process.num_threads()
            files += process.num_fds()
        except psutil.NoSuchProcess:
            continue
    shm = [path for path in Path("/dev/shm").iterdir() if path.is_file() and path.name not in shm_before]
    others = [path for path in _files(run) if not set(path.relative_to(run).parts) & set(RECORDS)]
    return {
        "memory_mb": memory / 2**20,
        "threads": threads,
        "open_files": files,
        "shm_files": len(shm),
        "shm_mb": _megabytes(shm),
        "temporary_files": len(temporary_files := list(_files(temporary))),
        "temporary_mb": _megabytes(temporary_files),
        "run_files": len(others),
        "run_mb": _megabytes(others),
    }


def _files(folder: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(folder):
        yield from (Path(directory) / name for name in names)


def _megabytes(paths: Sequence[Path]) -> float:
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total / 2**20


def last_step(metrics: Path) -> int:
    """Number of the last step in a file of metrics; 0 without one."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 20000))
        lines = file.read().splitlines()[1:]
    steps = [json.loads(line).get("step", 0) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return max(steps, default=0)


def growths(measured: Sequence[Mapping[str, float]], *, first: int, block: int) -> dict[str, Growth]:
    """Growth of each quantity over the medians of blocks of steps, from step `first` on, without what was measured
    after the last step, while the run ended."""
    blocks: dict[int, list[Mapping[str, float]]] = {}
    for row in measured:
        if first <= row["step"] < measured[-1]["step"]:
            blocks.setdefault(int(row["step"]) // block, []).append(row)
    steps = [statistics.fmean(row["step"] for row in rows) for rows in blocks.values()]
    names = [name for name in measured[0] if name not in ("step", "seconds")]
    return {
        name: _growth(steps, [statistics.median(row[name] for row in rows) for rows in blocks.values()], name)
        for name in names
    }


def _growth(steps: Sequence[float], values: Sequence[float], name: str) -> Growth:
    assert len(steps) > 2, "too few blocks for a slope"
    slope, intercept = statistics.linear_regression(steps, values)
    mean = statistics.fmean(steps)
    squares = sum((value - intercept - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    error = math.sqrt(squares / (len(steps) - 2) / sum((step - mean) ** 2 for step in steps))
    rise = slope * (steps[-1] - steps[0])
    grows = slope > 3 * error and rise > RESOLUTION.get(name, 0.5)
    return Growth(values[0], values[-1], 1000 * slope, 1000 * error, grows)


def cases(site: Site, steps: int) -> list[Case]:
    """The runs: `rl` and `sft` with short steps."""
    often = {"every": 25, "keep": 2, "every_minutes": 0, "export_every": 0}
    rl, sft = site.case("grpo"), site.case("sft")
    rl_tree = {
        **rl.tree,
        "rewards": [{"kind": "rule", "rule": "benchmarks.soak:short", "workers": 1, "check": "none"}],
        "train": {
            "num_steps": steps,
            "prompts_per_step": 4,
            "mini_batch_samples": 8,
            "max_tokens_per_micro_batch": 256,
        },
        "rollout": {"engine": "vllm", "num_samples_per_prompt": 2, "max_response_tokens": 6},
        "samples": {"every": 50},
        "eval": {"every": 50},
        "checkpoint": often,
        "watchdog": {},
    }
    sft_tree = {
        **sft.tree,
        "train": {"num_steps": steps, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 256},
        "eval": {"every": 50},
        "checkpoint": often,
        "watchdog": {},
    }
    return [Case("rl", "rl", 1, rl_tree), Case("sft", "sft", 1, sft_tree)]


def short(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """Reward of a short response; run in a worker process."""
    return 1.0 / (1 + len(response))


def soak(case: Case, folder: Path, seconds: float) -> list[dict[str, float]]:
    """Measurements of a run, taken every so many seconds until its end. Raises: RuntimeError if the run fails."""
    run, temporary = folder / case.name, folder / f"{case.name}-tmp"
    temporary.mkdir()
    shm_before = frozenset(path.name for path in Path("/dev/shm").iterdir())
    command = Command(
        case.argv(run, folder / f"{case.name}.yaml"), folder / f"{case.name}.log", {"TMPDIR": str(temporary)}
    )
    measured: list[dict[str, float]] = []
    began = time.monotonic()
    try:
        while command.status is None:
            time.sleep(seconds)
            step = last_step(run / "metrics.jsonl")
            if step:
                sizes = measure(command, shm_before, temporary, run)
                measured.append({"step": step, "seconds": time.monotonic() - began, **sizes})
    finally:
        command.kill()
    if command.status != 0:
        raise RuntimeError(f"{case.name} ended with status {command.status}: {command.said[-3000:]}")
    records = [path for path in _files(run) if set(path.relative_to(run).parts) & set(RECORDS)]
    measured[-1]["records_mb"] = _megabytes(records)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--first", type=int, default=200, help="first step of the line")
    parser.add_argument("--block", type=int, default=100, help="steps of a block")
    parser.add_argument("--only", choices=("rl", "sft"))
    parser.add_argument("--folder", type=Path, help="keep runs and measurements here")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        site = Site(folder / "site", "")
        site.prepare()
        result: dict[str, Any] = {"machine": machine("make test-soak"), "steps": args.steps, "runs": {}}
        growing = []
        for case in cases(site, args.steps):
            if args.only not in (None, case.name):
                continue
            measured = soak(case, folder, 1.0)
            (folder / f"{case.name}.json").write_text(json.dumps(measured))
            records = measured[-1].pop("records_mb")
            found = growths(measured, first=args.first, block=args.block)
            result["runs"][case.name] = {
                "seconds": round(measured[-1]["seconds"]),
                "records_bytes_per_step": round(records * 2**20 / args.steps),
                "quantities": {name: asdict(growth) for name, growth in found.items()},
            }
            for name, growth in found.items():
                verdict = "GROWS" if growth.grows else "flat"
                print(
                    f"{case.name} {name}: {growth.at_first:.2f} -> {growth.at_last:.2f}, "
                    f"{growth.per_1000_steps:+.3f} +- {growth.error_per_1000_steps:.3f} per 1000 steps: {verdict}",
                    flush=True,
                )
                growing += [f"{case.name} {name}"] * growth.grows
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if growing:
        print(f"growing: {', '.join(growing)}", file=sys.stderr)
    return bool(growing)


if __name__ == "__main__":
    sys.exit(main())
