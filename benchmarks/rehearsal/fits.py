"""Which of the published configurations fit, with how much, and what fitting costs: `make bench-fits`.

Each is rehearsed for two steps, all kinds of ranks or one whole pipeline. The rollout of whole responses is estimated
beside it: what a step would take without slices. Writes benchmarks/results/fits.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine
from benchmarks.rehearsal.scale import GIB, PROMPTS, longest_sequence, rehearse, responses
from megarlhf.commands.rehearse import HARDWARE
from megarlhf.config import RLConfig, load_config
from megarlhf.rehearsal.cost_model.hardware import load_hardware
from megarlhf.rehearsal.fakes.lengths import parse_lengths
from megarlhf.rehearsal.request import Request
from megarlhf.rehearsal.steady_round import round_seconds

RESULTS = ROOT / "benchmarks" / "results" / "fits.json"
MOST_GIB = 72.0
"""Of the 80 GB of a device: peak and margin together."""
HOST_MOST_GIB = 1024.0
"""Of a node of 8."""

SHARES = ("forward_and_backward", "bubble", "exposed", "recomputation")


@dataclass(frozen=True)
class Case:
    """A configuration, with lengths."""

    config: str
    mean: int
    """Tokens of a response, lognormal."""
    overrides: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    """Overrides for another engine that may be better for whole responses: the one that the file had before slices."""
    ranks: str | None = None
    """Of large jobs one whole pipeline; None: one of each kind."""


PIPELINE = "0,12,28,44,60"
"""Of 64 ranks in four stages: the first, for host memory, and those that keep most, last in context parallelism."""
WHOLE = ("rollout.vllm.gpu_memory_utilization=0.75",)
CASES = {
    "Llama-3.1-8B PPO, 16k, 8 GPUs": Case("llama-3-8b/ppo-8", 4000, whole=(*WHOLE, "rollout.parallel.tp=1")),
    "Llama-3.1-70B PPO, 16k, 64 GPUs": Case("llama-3-70b/ppo-64", 4000, ranks=PIPELINE),
    "Llama-3.1-70B GRPO, 8k, 32 GPUs": Case("llama-3-70b/grpo-32", 1700),
    "Llama-3.1-70B GRPO, 32k, 64 GPUs": Case("llama-3-70b/grpo-64", 8000, whole=WHOLE, ranks=PIPELINE),
    "Llama-3.1-70B GRPO, 8k, 64 GPUs": Case(
        "llama-3-70b/grpo-64",
        1700,
        (
            "actor.parallel.cp=2",
            "actor.recompute=none",
            "actor.recompute_layers=",
            "train.max_tokens_per_micro_batch=8192",
            "rollout.max_response_tokens=7168",
            "rollout.parallel.tp=4",
            "rollout.vllm.gpu_memory_utilization=0.75",
        ),
        whole=("rollout.parallel.tp=8",),
        ranks=PIPELINE,
    ),
    "Qwen3-30B-A3B GRPO, 32k, 16 GPUs": Case(
        "qwen3-30b-a3b/grpo-16", 8000, whole=("rollout.parallel.tp=2", "rollout.vllm.gpu_memory_utilization=0.7")
    ),
    "Llama-3.1-405B GRPO, 16k, 256 GPUs": Case(
        "llama-3.1-405b/grpo-256",
        4000,
        whole=("rollout.parallel.tp=16", "rollout.vllm.gpu_memory_utilization=0.8"),
        ranks=",".join(map(str, range(0, 256, 32))),
    ),
}


def measure(case: Case) -> dict[str, Any]:
    """What a case needs, and what it costs."""
    config = f"configs/{case.config}.yaml"
    ranks = [] if case.ranks is None else ["--ranks", case.ranks]
    with tempfile.TemporaryDirectory() as directory:
        found, took = rehearse(config, Path(directory) / "now", *ranks, *case.overrides, mean=case.mean)
    tightest = _tightest(found)
    last, rollout, whole = found["times"][-1], found["rollouts"][-1], seconds_of_whole(case)
    return {
        "config": case.config,
        "overrides": list(case.overrides),
        "fits": not found["faults"]
        and not found["refusals"]
        and tightest["need"] <= MOST_GIB * GIB
        and found["host_per_node"] <= HOST_MOST_GIB * GIB,
        "peak_gib": gib(tightest["peak"]),
        "margin_gib": gib(tightest["need"] - tightest["peak"]),
        "tightest": f"rank {tightest['rank']}, {tightest['peak_at'][1]} in step {tightest['peak_at'][0]}",
        "host_gib_per_node": gib(found["host_per_node"]),
        "longest_sequence": longest_sequence(found, MOST_GIB * GIB),
        "step_seconds_estimated": round(last["seconds"], 1),
        "step_seconds_whole_estimated": round(last["seconds"] - rollout["slowest"] + whole, 1),
        "rollout": {key: round(rollout[key], 1) for key in ("slowest", "fastest", "waited")},
        "rollout_whole": round(whole, 1),
        "settings": {key: found["config"]["rollout"][key] for key in ("slices", "parallel", "vllm")},
        "training": {
            key: round(last[key], 3) for key in ("forward_and_backward", "bubble", "exposed", "recomputation")
        },
        "utilisation": round(last["utilisation"], 3),
        "seconds": {each["phase"]: round(each["seconds"], 2) for each in last["phases"] if each["seconds"] >= 0.005},
        "price_seconds": prices(last),
        "peaks_gib": peaks(tightest),
        "refusals": found["refusals"],
        "faults": found["faults"],
        "ranks_rehearsed": len(found["ranks"]),
        "minutes": round(took.seconds / 60, 1),
        "tool_gib": round(took.gib, 2),
    }


def seconds_of_whole(case: Case) -> float:
    """Seconds of the rollout where responses are drawn whole, by the better of two engines."""
    return min(seconds_of_rollout(case, "rollout.slices=1", *engine) for engine in ((), case.whole))


def seconds_of_rollout(case: Case, *overrides: str) -> float:
    """Seconds of the rollout of a case with further overrides."""
    hardware = load_hardware(HARDWARE)
    cfg = load_config(RLConfig, ROOT / f"configs/{case.config}.yaml", [*case.overrides, *overrides])
    request = Request(
        command="rl",
        cfg=cfg,
        world_size=cfg.run.planned_ranks,
        hardware=hardware,
        device_bytes=int(hardware.memory.value),
        prompt_lengths=parse_lengths(PROMPTS, "prompts"),
        response_lengths=parse_lengths(responses(case.mean), "responses"),
    )
    return round_seconds(request)


def prices(step: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step that each feature takes, mean over ranks. Copies are taken to hide behind nothing."""
    phases = step["phases"]
    updates = [each for each in phases if each["phase"].startswith("optimizer/")]
    return {
        "recomputation": round(sum(each["again"] for each in phases), 2),
        "roles and engine come and go": round(sum(each["offload"] for each in phases if each not in updates), 2),
        "optimizer state is streamed": round(sum(each["offload"] for each in updates), 2),
    }


def peaks(rank: dict[str, Any]) -> dict[str, float]:
    """By phase, over all steps, GiB of tensors."""
    most: dict[str, int] = {}
    for row in rank["memory"]:
        most[row["phase"]] = max(most.get(row["phase"], 0), row["peak"])
    return {phase: gib(peak) for phase, peak in most.items()}


def gib(nbytes: float) -> float:
    return round(nbytes / GIB, 2)


def _tightest(found: dict[str, Any]) -> dict[str, Any]:
    rank: dict[str, Any] = next(each for each in found["ranks"] if each["rank"] == found["tightest"])
    return rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    about = machine("python -m benchmarks.rehearsal.fits")  # before the results change the tree
    for name in arguments.only:
        row = measure(CASES[name]) | {"machine": about}
        kept = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.is_file() else {}
        rows = kept | {name: row}
        rows = {each: rows[each] for each in CASES if each in rows}
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {row['peak_gib']} + {row['margin_gib']} GiB, fits: {row['fits']}", flush=True)


if __name__ == "__main__":
    main()
