"""What a slow reward costs: python -m benchmarks.slow_rewards (`make bench-rewards`).

A reward begins when the responses are there and is waited for after the log-probs. In one run of `megarlhf rl` a
function rewards the responses at once in some steps, and sleeps in others, in turn: as long as a part of what the
log-probs and values take, or twice as long. The function sleeps, as one does that waits for a judge on other machines;
a function that computes takes cores from the ranks of its machine, and costs what it takes.

Reported for each delay: by how much the seconds between sampling and training grew (`seconds_experience`, the median
over rounds, each less the step without a delay in the same round), as a share of the delay: 0 is free, 1 is what
waiting before the log-probs would cost. `least` is the least that is possible: what of the delay is longer than the
work beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, machine
from benchmarks.packing_workload import Sizes, write_model
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.rollout.rewards.batch import RewardBatch

SIZES = Sizes(vocab=4096, hidden=384, layers=6, heads=6, kv_heads=6, intermediate=1024)
SMALL = Sizes(vocab=64, hidden=32, layers=2, heads=2, kv_heads=2, intermediate=64)
PARTS = (0.0, 0.25, 0.5, 0.75, 2.0)
"""Delays, in parts of the seconds that log-probs and values take."""
DELAYS = "SLOW_REWARD_SECONDS"
"""The environment variable with the delays, in turn, separated by commas."""
_CALLS = itertools.count()


def reward(batch: RewardBatch) -> list[float]:
    """The length of each response, after the delay of this call. One call is one step."""
    delays = [float(seconds) for seconds in os.environ[DELAYS].split(",")]
    time.sleep(delays[next(_CALLS) % len(delays)])
    return [float(len(text)) for text in batch.responses]


def seconds_of_steps(model: Path, work: Path, name: str, steps: int, delays: list[float], prompts: int) -> list[float]:
    """`seconds_experience` of each step of a run."""
    data = work / "prompts.jsonl"
    text = " ".join(f"w{n % 10}" for n in range(40))
    data.write_text("".join(json.dumps({"prompt": f"w{n % 10} {text}"}) + "\n" for n in range(prompts)))
    section = {"model": {"path": str(model)}, "optim": {"lr": 1e-5}}
    tree: dict[str, Any] = {
        "run": {"dir": str(work / name)},
        "actor": section,
        "critic": {**section, "model": {**section["model"], "fresh_head": True}},
        "rewards": [
            {"kind": "rule", "rule": "benchmarks.slow_rewards:reward", "timeout_seconds": 600, "check": "none"}
        ],
        "data": {"train": str(data), "max_prompt_tokens": 256},
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 4},
        "train": {
            "num_steps": steps,
            "prompts_per_step": prompts,
            "mini_batch_samples": 2 * prompts,
            "max_tokens_per_micro_batch": 1024,
        },
        "checkpoint": {"every": 0, "every_minutes": 0},
    }
    (work / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    env = os.environ | {DELAYS: ",".join(map(str, delays)), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megarlhf", "rl", "-c", str(work / f"{name}.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [row["seconds_experience"] for row in read_metrics(work / name) if row["step"]]


def measure(sizes: Sizes, rounds: int, prompts: int) -> dict[str, Any]:
    """All figures. The first round warms up and is not counted."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        work = Path(folder)
        model = write_model(work / "model", sizes)
        alone = statistics.median(seconds_of_steps(model, work, "alone", 4, [0.0], prompts)[1:])
        delays = [part * alone for part in PARTS]
        steps = len(PARTS) * (rounds + 1)
        seconds = seconds_of_steps(model, work, "delays", steps, delays, prompts)[len(PARTS) :]
    by_round = [seconds[start : start + len(PARTS)] for start in range(0, len(seconds), len(PARTS))]
    without = statistics.median(each[0] for each in by_round)
    found = {}
    for n, (part, delay) in enumerate(zip(PARTS, delays, strict=True)):
        if part:
            costs = [(each[n] - each[0]) / delay for each in by_round]
            found[str(part)] = {
                "delay_seconds": delay,
                "cost": statistics.median(costs),
                "lowest": min(costs),
                "highest": max(costs),
                "least": max(0.0, (delay - without) / delay),
            }
    return {"rounds": rounds, "seconds_without": without, "by_delay_in_parts": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_rewards", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model: to see whether this runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/slow_rewards.json")
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    sizes, prompts = (SMALL, 2) if arguments.small else (SIZES, 16)
    result = {**machine("make bench-rewards"), "model": dataclasses.asdict(sizes)}
    result |= measure(sizes, arguments.rounds, prompts)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "model"}, indent=1))


if __name__ == "__main__":
    main()
