"""What large jobs take to rehearse, and what they are said to need: one process of `megarlhf rehearse` for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import ROOT
from benchmarks.rehearsal.arithmetic import rows_of

MEAN = 1700
"""Tokens of a response: 128 prompts x 8 samples, at most 8,192 tokens a sequence."""
CONFIGURATIONS = {
    "Llama-3-70B PPO, 64 ranks": "benchmarks/rehearsal/resident/llama-3-70b-ppo-64.yaml",
    "Llama-3-70B PPO, 512 ranks": "benchmarks/rehearsal/resident/llama-3-70b-ppo-512.yaml",
    "Llama-3.1-405B GRPO, 1024 ranks": "benchmarks/rehearsal/resident/llama-3.1-405b-grpo-1024.yaml",
    "Qwen3-30B-A3B GRPO, 64 ranks": "benchmarks/rehearsal/resident/qwen3-30b-a3b-grpo-64.yaml",
}
ROLES = {name: ("actor", "critic", "reward_model") if "PPO" in name else ("actor",) for name in CONFIGURATIONS}
"""Sections of each file."""
BY_HAND = "Llama-3-70B PPO, 512 ranks"
"""What it needs is counted by hand too."""
GIB = 2**30
PASSING = ("activations", "logits and kernels", "kernels' work space", "buckets")
"""Kinds of memory that grow with the tokens of a micro-batch."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Took:
    """A command's cost."""

    seconds: float
    gib: float
    """Largest memory of all its processes together; what forked processes share counts once."""


PROMPTS = "constant:512"


def responses(mean: int) -> str:
    """Lengths of responses in words, lognormal."""
    return f"lognormal:mean={mean},sigma=0.8"


def rehearse(
    config: str, out: Path, *extra: str, mean: int = MEAN, lengths: tuple[str, str] | None = None
) -> tuple[dict[str, Any], Took]:
    """`rehearsal.json` of a configuration and what it took. `mean`: tokens of a response, lognormal; `lengths`: of
    prompts and of responses, in place of that and of 512."""
    prompts, drawn = lengths or (PROMPTS, responses(mean))
    words = ["--prompt-lengths", prompts, "--response-lengths", drawn]
    command = [sys.executable, "-m", "megarlhf", "rehearse", "rl", "-c", config, *words, *extra, "-o", str(out)]
    began, most = time.perf_counter(), 0
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None:
            most = max(most, _memory(process))
            time.sleep(POLL_SECONDS)
        text = "" if run.stdout is None else run.stdout.read().decode()
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{text}")
    found = json.loads((out / "rehearsal.json").read_text(encoding="utf-8"))
    return found, Took(time.perf_counter() - began, most / GIB)


def _memory(process: psutil.Process) -> int:
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_full_info().pss
    except psutil.Error:  # it has just ended
        pass
    return total


def resident(name: str) -> list[str]:
    """What keeps everything on the device, as these figures have it."""
    parts = ("parameters", "gradients", "optimizer")
    return ["rollout.vllm.sleep_level=0", *(f"{role}.offload.{part}=false" for role in ROLES[name] for part in parts)]


def measure(names: Iterable[str] = CONFIGURATIONS, *extra: str) -> dict[str, dict[str, Any]]:
    """By configuration: `seconds` and `tool_gib` of the tool, and what it says."""
    rows = {}
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            found, took = rehearse(CONFIGURATIONS[name], Path(directory), *resident(name), *extra)
        rows[name] = row(found, took)
        if name == BY_HAND:
            rows[name]["arithmetic"] = [asdict(each) | {"difference": each.difference} for each in rows_of(found)]
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def row(found: dict[str, Any], took: Took) -> dict[str, Any]:
    """Of the table."""
    tightest = next(each for each in found["ranks"] if each["rank"] == found["tightest"])
    last = found["times"][-1] if found["times"] else None
    return {
        "config": found["config"]["run"]["dir"].removeprefix("runs/"),
        "seconds": round(took.seconds, 1),
        "tool_gib": round(took.gib, 2),
        "ranks_rehearsed": len(found["ranks"]),
        "fits": found["fits"],
        "peak_gib": round(tightest["peak"] / GIB, 2),
        "margin_gib": round((tightest["need"] - tightest["peak"]) / GIB, 2),
        "capacity_gib": round(found["capacity"] / GIB, 2),
        "tightest": f"rank {tightest['rank']}, {tightest['peak_at'][1]} in step {tightest['peak_at'][0]}",
        "longest_sequence": longest_sequence(found, found["capacity"]),
        "step_seconds": None if last is None else round(last["seconds"], 1),
        "rollout_seconds": round(found["rollouts"][-1]["slowest"], 1),
        "utilisation": None if last is None else round(last["utilisation"], 3),
        "refusals": found["refusals"],
        "faults": found["faults"],
    }


def longest_sequence(found: dict[str, Any], capacity: float) -> int:
    """Tokens of the longest micro-batch, which must hold the longest sequence, that would fit into `capacity` bytes of
    every rehearsed rank: what passes in training grows with the tokens, fragmentation with it, the rest of the margin
    stays, and so does the work space of attention's backward. Not more than the model has positions. 0: not even the
    first token."""
    path = ROOT / found["config"]["actor"]["model"]["path"] / "config.json"
    positions: int = json.loads(path.read_text(encoding="utf-8"))["max_position_embeddings"]
    return min(positions, *(_longest(each, found, capacity) for each in found["ranks"]))


def _longest(rank: dict[str, Any], found: dict[str, Any], capacity: float) -> int:
    rows = [each for each in rank["memory"] if each["phase"].startswith("train/")]
    peak = max(rows, key=lambda each: each["peak"])
    passing = sum(nbytes for kind, nbytes in peak["by_kind"].items() if kind in PASSING)
    margin = rank["need"] - rank["peak"]
    gaps = next((each["nbytes"] for each in rank["margin"] if each["name"] == "fragmentation"), 0)
    room = capacity - (peak["peak"] - passing) - (margin - gaps)
    tokens = found["config"]["train"]["max_tokens_per_micro_batch"]
    return max(0, int(tokens * room / (passing * (1 + gaps / max(1, passing)))))
