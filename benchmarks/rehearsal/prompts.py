"""What sharing prompts brings a large job, rehearsed: `python -m benchmarks.rehearsal.prompts`.

GRPO of Llama-3.1-70B on 64 GPUs: 64 prompts of 2,048 tokens with 16 responses of 2,048 tokens each, in four
mini-batches of 256. Each response with a prompt of its own, and shared, with mini-batches of whole groups and of single
samples. One pipeline and one step. Nothing is measured: times are estimates by the hardware file of an H100. Writes
benchmarks/results/prompts_rehearsal.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine
from benchmarks.rehearsal.figures import table
from benchmarks.rehearsal.fits import HOST_MOST_GIB, MOST_GIB, gib, peaks
from benchmarks.rehearsal.scale import GIB, rehearse

RESULTS = ROOT / "benchmarks" / "results" / "prompts_rehearsal.json"
CONFIG = "configs/llama-3-70b/grpo-64.yaml"
TOKENS = 2048
"""Of each prompt and of each response."""
LENGTHS = f"constant:{TOKENS}"
PIPELINE = "0,16,32,48"
"""Of 64 ranks in four stages."""
OVERRIDES = (
    f"data.max_prompt_tokens={TOKENS}",
    f"rollout.max_response_tokens={TOKENS}",
    "rollout.num_samples_per_prompt=16",
    "train.prompts_per_step=64",
    "train.mini_batch_samples=256",
    "train.max_tokens_per_micro_batch=18432",  # a prompt with half of its responses, or four whole sequences
    "actor.parallel.tp=8",
    "actor.parallel.cp=1",  # nothing is shared under context parallelism
)
UNSHARED = "a prompt for each response"
CASES: dict[str, tuple[str, ...]] = {
    UNSHARED: ("train.share_prompts=false", "train.shuffle=groups"),
    "shared, shuffle: groups": ("train.shuffle=groups",),
    "shared, shuffle: samples": ("train.shuffle=samples",),
}
WIRED = ("train/actor", "score/actor", "score/reference")
"""Phases whose messages grow with the tokens that are computed."""


def measure(overrides: tuple[str, ...]) -> dict[str, Any]:
    """What a case takes: estimated seconds, floating-point operations of a GPU as they are counted operation by
    operation, memory, and what the rank that says most says."""
    options = ("--steps", "1", "--ranks", PIPELINE, *OVERRIDES, *overrides)
    with tempfile.TemporaryDirectory() as directory:
        found, took = rehearse(CONFIG, Path(directory) / "out", *options, lengths=(LENGTHS, LENGTHS))
    (step,) = (each for each in found["times"] if each["step"] == 1)
    tightest = next(each for each in found["ranks"] if each["rank"] == found["tightest"])
    trained = next(
        row for row in sorted(found["ranks"], key=_peak_of_training, reverse=True)[0]["memory"] if _trains(row)
    )
    return {
        "overrides": list(overrides),
        "fits": not found["faults"]
        and not found["refusals"]
        and tightest["need"] <= MOST_GIB * GIB
        and found["host_per_node"] <= HOST_MOST_GIB * GIB,
        "peak_gib": gib(tightest["peak"]),
        "margin_gib": gib(tightest["need"] - tightest["peak"]),
        "tightest": f"rank {tightest['rank']}, {tightest['peak_at'][1]}",
        "peaks_gib": {phase: max(peaks(rank)[phase] for rank in found["ranks"]) for phase in peaks(tightest)},
        "training_gib": {kind: gib(nbytes) for kind, nbytes in trained["by_kind"].items() if nbytes >= GIB / 100},
        "host_gib_per_node": gib(found["host_per_node"]),
        "step_seconds_estimated": round(step["seconds"], 1),
        "training": {
            key: round(step[key], 3) for key in ("forward_and_backward", "bubble", "exposed", "recomputation")
        },
        "utilisation": round(step["utilisation"], 3),
        "seconds": {each["phase"]: round(each["seconds"], 2) for each in step["phases"] if each["seconds"] >= 0.005},
        "pflops_a_gpu": {each["phase"]: round(each["flops"] / 1e15, 2) for each in step["phases"] if each["flops"]},
        "wire_gb": _wire(found["ranks"]),
        "faults": found["faults"],
        "refusals": found["refusals"],
        "ranks_rehearsed": len(found["ranks"]),
        "minutes": round(took.seconds / 60, 1),
        "tool_gib": round(took.gib, 2),
    }


def _trains(row: dict[str, Any]) -> bool:
    return bool(row["phase"] == "train/actor" and row["step"] == 1)


def _peak_of_training(rank: dict[str, Any]) -> int:
    return max(row["peak"] for row in rank["memory"] if _trains(row))


def _wire(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """GB in a step by phase, of the rank that says most in it; what is below 0.01 is left out."""
    by_phase: dict[str, float] = {}
    for rank in ranks:
        own: dict[str, float] = {}
        for message in rank["messages"]:
            if message["step"] == 1:
                own[message["phase"]] = own.get(message["phase"], 0.0) + message["nbytes"] / 1e9
        by_phase |= {phase: max(nbytes, by_phase.get(phase, 0.0)) for phase, nbytes in own.items()}
    return {phase: round(nbytes, 2) for phase, nbytes in by_phase.items() if nbytes >= 0.01}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By case, how many times as much is without sharing, of what is in `rows`."""
    apart = rows.get(UNSHARED)
    if apart is None:
        return {}
    return {name: _ratios(apart, row) for name, row in rows.items() if name != UNSHARED}


def _ratios(apart: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    both = {"step": (apart["step_seconds_estimated"], row["step_seconds_estimated"])}
    for phase in WIRED:
        both |= {f"{phase} seconds": (apart["seconds"][phase], row["seconds"][phase])}
        both |= {f"{phase} flops": (apart["pflops_a_gpu"][phase], row["pflops_a_gpu"][phase])}
        both |= {f"{phase} wire": (apart["wire_gb"][phase], row["wire_gb"][phase])}
    return {what: round(before / after, 3) for what, (before, after) in both.items()}


def docs_table(found: dict[str, Any]) -> str:
    """Of docs/packing.md."""
    words = ("", *found["cases"])
    rows = [
        ("step", *(f"{row['step_seconds_estimated']:.0f} s" for row in found["cases"].values())),
        *(
            (f"`{phase}`", *(f"{row['seconds'][phase]:.1f} s" for row in found["cases"].values()))
            for phase in ("rollout", *WIRED)
        ),
        ("operations of `train/actor`, a GPU", *_column(found, "pflops_a_gpu", "{:.2f} PFLOP")),
        ("wire of `train/actor`, the rank with most", *_column(found, "wire_gb", "{:,.0f} GB")),
        ("peak of `train/actor`", *_column(found, "peaks_gib", "{:.1f} GiB")),
        (
            "the tightest rank with its margin",
            *(f"{row['peak_gib']:.1f} + {row['margin_gib']:.1f} GiB" for row in found["cases"].values()),
        ),
        ("fits in 72 GiB", *("yes" if row["fits"] else "no" for row in found["cases"].values())),
        ("bubble of training", *(f"{row['training']['bubble']:.1%}" for row in found["cases"].values())),
    ]
    return table(words, rows)


def _column(found: dict[str, Any], key: str, form: str) -> list[str]:
    return [form.format(row[key]["train/actor"]) for row in found["cases"].values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="CASE")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    about = machine("python -m benchmarks.rehearsal.prompts")  # before the results change the tree
    for name in arguments.only:
        row = measure(CASES[name]) | {"machine": about}
        kept = json.loads(arguments.out.read_text(encoding="utf-8"))["cases"] if arguments.out.is_file() else {}
        rows = kept | {name: row}
        rows = {each: rows[each] for each in CASES if each in rows}
        found = {"config": CONFIG, "overrides": OVERRIDES, "ratios": ratios(rows), "cases": rows}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {row['step_seconds_estimated']} s, {row['peak_gib']} + {row['margin_gib']} GiB", flush=True)
    print(docs_table(found))


if __name__ == "__main__":
    main()
