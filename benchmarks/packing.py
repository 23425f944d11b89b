"""Packed rows against padded ones, and against TRL's GRPO, on the CPU: one training phase, and a whole step.

A training phase is what a step does once its responses are there: old and reference log-probs, values, rewards,
advantages, forward, backward and optimizer. The responses are the workload's own, the same on both sides, and so
are model, settings, number of optimizer steps and threads (one process each). Comparisons:

  ppo_long_tailed         ours, with a critic: packed against padded
  grpo_long_tailed        ours against TRL
  grpo_equal              the same with all responses of one length: nothing to gain from packing
  grpo_equal_step         whole steps with equal lengths: each side generates with its own engine (TRL: transformers)
  one_update_long_tailed  one optimizer step and no KL, TRL's defaults: neither side then makes old or reference
  one_update_equal        log-probs by forwards of their own

Everyone runs in a child of its own that waits without a core while the others run, in turn, to and fro; the first
round is not counted. Each side but our padded one comes with two micro-batch sizes, and its fastest is compared.
Gradient norms of the first round have to agree: ours among themselves, and with TRL's where a step has one update
(otherwise TRL deals samples into updates in an order of its own). Ratios are of medians; every round is in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interleaved import Ask, asking, fastest, in_turn, norm_of, ratio, require_same, require_whole, summary
from benchmarks.machine import OVER, ROOT, machine
from benchmarks.packing_children import Child, Message, environment, trl_environment
from benchmarks.packing_workload import REHEARSAL, Kind, Sizes, make_workload, write_model
from benchmarks.peers import UnavailableError

RESULT = ROOT / "benchmarks" / "results" / "packing.json"
BETA = 0.04
OURS, TRL = "benchmarks.packing_ours", "benchmarks.peers_trl"


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Micro-batch sizes that each way is tried with."""

    packed: tuple[int, ...]
    """Tokens."""
    padded: tuple[int, ...]
    """Samples."""
    trl: tuple[int, ...]
    """Samples."""


CANDIDATES: dict[Kind, Candidates] = {
    "long_tailed": Candidates(packed=(2048, 4096), padded=(8,), trl=(4, 16)),
    "equal": Candidates(packed=(2048, 2816), padded=(), trl=(16, 32)),
}
SMALL: dict[Kind, Candidates] = {
    "long_tailed": Candidates(packed=(64,), padded=(4,), trl=(4,)),
    "equal": Candidates(packed=(64,), padded=(), trl=(4,)),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who runs what."""

    workload: Kind
    algo: str = "grpo"
    beta: float = BETA
    mini_batches: int | None = None
    """None: as `Sizes` says."""
    inject: bool = True
    """False: whole steps, with generation."""
    padded: bool = False
    trl: bool = True

    @property
    def measure(self) -> str:
        return "phase_seconds" if self.inject else "step_seconds"


COMPARISONS = {
    "ppo_long_tailed": Comparison(workload="long_tailed", algo="ppo", padded=True, trl=False),
    "grpo_long_tailed": Comparison(workload="long_tailed"),
    "grpo_equal": Comparison(workload="equal"),
    "grpo_equal_step": Comparison(workload="equal", inject=False),
    "one_update_long_tailed": Comparison(workload="long_tailed", beta=0.0, mini_batches=1),
    "one_update_equal": Comparison(workload="equal", beta=0.0, mini_batches=1),
}


@dataclass(frozen=True)
class Setting:
    """What a comparison runs on."""

    model: Path
    sizes: Sizes
    candidates: dict[Kind, Candidates]
    threads: int
    rounds: int
    trl: dict[str, str] | None
    """Environment of TRL's children; None: it is left out."""

    def sizes_of(self, comparison: Comparison) -> Sizes:
        updates = comparison.mini_batches or self.sizes.mini_batches
        return dataclasses.replace(self.sizes, mini_batches=updates)


def start(comparison: Comparison, setting: Setting, stack: contextlib.ExitStack) -> tuple[dict[str, Ask], Message]:
    """The children of a comparison: name of each way -> how to have it run a round; and what they say of themselves."""
    sizes, candidates = setting.sizes_of(comparison), setting.candidates[comparison.workload]
    common = {
        "model": str(setting.model),
        "sizes": dataclasses.asdict(sizes),
        "threads": setting.threads,
        "workload": comparison.workload,
        "beta": comparison.beta,
        "lr": 1e-6,
    }

    def child(module: str, env: dict[str, str], **options: Any) -> Child:
        made = Child(module, {**common, **options}, env)
        stack.callback(made.stop)
        return made

    ways: dict[str, dict[str, int]]  # what packing alone brings: `make bench-prompts` has the rest
    ways = {
        f"packed {size}": {"max_tokens_per_micro_batch": size, "share_prompts": False} for size in candidates.packed
    }
    if comparison.padded:
        ways |= {f"padded {size}": {"micro_batch_samples": size} for size in candidates.padded}
    ours = {"algo": comparison.algo, "engine": "megatron" if comparison.inject else "vllm"}
    asks: dict[str, Ask] = {}
    facts: Message = {}
    # vLLM is one to a process.
    for group in [ways] if comparison.inject else [{name: train} for name, train in list(ways.items())[-1:]]:
        process = child(OURS, environment(setting.threads), ways=group, **ours)
        facts |= dict.fromkeys(group, process.facts)
        asks |= {name: asking(process, way=name, inject=comparison.inject) for name in group}
    if comparison.trl and setting.trl is not None:
        for size in candidates.trl:
            peer = {"attention": "sdpa", "compile": False, "continuous_batching": False, "micro_batch_samples": size}
            process = child(TRL, setting.trl, **peer)
            asks[f"trl {size}"] = asking(process, inject=comparison.inject)
            facts[f"trl {size}"] = process.facts | {"settings": peer}
    return asks, facts


def compare(comparison: Comparison, setting: Setting) -> Message:
    """Runs the rounds; summary of every way, all rounds included."""
    with contextlib.ExitStack() as stack:
        asks, facts = start(comparison, setting, stack)
        rounds = in_turn(asks, setting.rounds)
    workload = make_workload(comparison.workload, setting.sizes)
    agreement = check(comparison, rounds, workload.response_tokens, setting)
    ways = {name: summary(comparison.measure, many[1:], workload.tokens()) for name, many in rounds.items()}
    return {
        "measure": comparison.measure,
        "updates": setting.sizes_of(comparison).mini_batches,
        "beta": comparison.beta,
        "grad_norms_differ_by": agreement,
        "ways": {name: way | {"about": facts[name]} for name, way in ways.items()},
        "fastest": {kind: fastest(ways, kind) for kind in ("packed", "padded", "trl")},
    }


def check(comparison: Comparison, rounds: dict[str, list[Message]], tokens: int, setting: Setting) -> float | None:
    """The largest relative difference of first gradient norms between ways that must agree; None where none must.

    Ours deal samples into mini-batches alike, TRL in an order of its own: it has to agree where all are in one. With
    generation everyone trains on responses of its own, and what is looked at is that none has ended early.
    """
    if not comparison.inject:
        require_whole(rounds, tokens)
        return None
    names = [name for name in rounds if setting.sizes_of(comparison).mini_batches == 1 or not name.startswith("trl")]
    return require_same({name: norm_of(rounds[name][0]) for name in names})


def ratios(comparisons: dict[str, Message]) -> dict[str, float | None]:
    """What the goals are about; None where a side was left out."""
    trl = {name: ratio(comparisons.get(name), "trl", "packed") for name in COMPARISONS if name != "ppo_long_tailed"}
    equal = [trl["grpo_equal"], trl["grpo_equal_step"]]
    return {
        "padded_over_packed": ratio(comparisons.get("ppo_long_tailed"), "padded", "packed"),
        "trl_over_ours_long_tailed": trl["grpo_long_tailed"],
        "trl_over_ours_equal": None if None in equal else min(value for value in equal if value is not None),
        "trl_over_ours_equal_phase": trl["grpo_equal"],
        "trl_over_ours_equal_step": trl["grpo_equal_step"],
        "trl_over_ours_one_update_long_tailed": trl["one_update_long_tailed"],
        "trl_over_ours_one_update_equal": trl["one_update_equal"],
    }


def run(arguments: argparse.Namespace) -> Message:
    """All comparisons, or those that were named."""
    left_out: dict[str, str] = {}
    trl = None
    try:
        if arguments.no_trl:
            raise UnavailableError("--no-trl")
        trl = trl_environment(arguments.threads)
    except UnavailableError as reason:
        left_out["trl"] = str(reason)
    if importlib.util.find_spec("vllm") is None or arguments.no_vllm:
        left_out["grpo_equal_step"] = "--no-vllm" if arguments.no_vllm else "vllm is not installed"
    for what, why in left_out.items():
        print(f"left out: {what}: {why}", flush=True)
    sizes, candidates = (REHEARSAL, SMALL) if arguments.rehearse else (Sizes(), CANDIDATES)
    comparisons: dict[str, Message] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", sizes)
        setting = Setting(model, sizes, candidates, arguments.threads, arguments.rounds, trl)
        for name in arguments.only or COMPARISONS:
            if name in left_out:
                continue
            comparison = comparisons[name] = compare(COMPARISONS[name], setting)
            medians = {way: round(about["seconds"]["median"], 3) for way, about in comparison["ways"].items()}
            print(name, medians, "gradient norms differ by", comparison["grad_norms_differ_by"], flush=True)
    return {
        **ratios(comparisons),
        "rehearsal": arguments.rehearse,
        "left_out": left_out,
        "comparisons": comparisons,
        "workloads": {kind: make_workload(kind, sizes).facts() for kind in CANDIDATES},
        "sizes": dataclasses.asdict(sizes),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "direction": OVER,
        "machine": machine("make bench-packing"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side's one process")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, help="default: all")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.out == RESULT and (arguments.rehearse or arguments.only):
        parser.error("a rehearsal, or a part, is no result: give --out")
    result = run(arguments)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print({name: value and round(value, 2) for name, value in ratios(result["comparisons"]).items()})


if __name__ == "__main__":
    main()
