"""Responses drawn in slices against whole ones: python -m benchmarks.slices (`make bench-slices`).

Two engines of vLLM, one rank and one thread each, draw for a run of many steps whose responses have long-tailed
lengths (lognormal, cut at a multiple of the mean). Each number of slices has its own run, and the runs make a round in
turn: the part of the samples of several steps that one version of the weights draws, by the project's own rule.
Reported are the seconds of a round, in which one step's samples become whole, for each of these samples' tokens.

Lengths repeat after as many steps as the largest number of slices, and all runs are measured over the same steps, which
are a multiple of that: so they draw the same tokens, of samples that are trained on. The rounds before, in which a run
begins and draws more or less than later, are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import ROOT, machine
from benchmarks.packing_workload import Sizes
from benchmarks.two_engines import on_two_ranks, planted
from megarlhf.runtime import Runtime

RESULT = ROOT / "benchmarks" / "results" / "slices.json"
SLICES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Samples of a step."""

    samples: int = 64
    prompt: int = 32
    """Tokens of a prompt."""
    mean: int = 80
    """Mean of the lengths before they are cut."""
    sigma: float = 1.0
    """Deviation of the logarithm of a length."""
    longest: int = 12 * 80


MODEL = Sizes(hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152, max_response=12 * 80)
"""SmolLM2-135M."""
SMALL = Load(samples=6, prompt=8, mean=4, longest=16)
SMALL_MODEL = Sizes(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=256)


def lengths_of(load: Load, step: int) -> list[int]:
    """Response tokens of each sample of a step."""
    rng, mu = random.Random(step % max(SLICES)), math.log(load.mean) - load.sigma**2 / 2
    return [min(max(1, round(rng.lognormvariate(mu, load.sigma))), load.longest) for _ in range(load.samples)]


class SlicedRun:
    """A run without training, round by round. Every rank makes the same calls."""

    def __init__(self, load: Load, engine: Any, slices: int, first: int) -> None:
        """first: the first step, whose weights begin all that is missing"""
        from megarlhf.rollout.in_flight import InFlight
        from megarlhf.rollout.slices import SliceRule

        self.load, self.engine, self.round = load, engine, first
        self.flight = InFlight(SliceRule(slices, 0, load.longest))

    def prompt(self, number: int) -> torch.Tensor:
        return torch.randint(4, 200, (self.load.prompt,), generator=torch.Generator().manual_seed(number))

    def next_round(self) -> tuple[float, int]:
        """Draw a round; returns its seconds and the tokens of the samples that are whole then."""
        from megarlhf.rollout.responses import Sampling

        load, step, flight = self.load, self.round, self.flight
        for begun in flight.rule.steps(step, step + 1000):
            if begun not in flight:
                numbers = range(begun * load.samples, (begun + 1) * load.samples)
                flight.begin(begun, numbers, 1, step)
        requests = flight.requests(step, self.prompt, lambda step, sample: step * load.samples + sample)
        lengths = [lengths_of(load, of_step)[sample] for of_step, sample in requests.origins]
        sampling = Sampling(max_tokens=load.longest, end_ids=())
        self.engine._version = step
        assert self.engine._llm.reset_prefix_cache()  # as an update does
        with planted(lengths):
            dist.barrier()
            began = time.perf_counter()
            drawn = self.engine.generate(requests.prompts, requests.seeds, sampling, parts=requests.parts)
            dist.barrier()
            seconds = time.perf_counter() - began
        flight.extend(requests, drawn)
        whole = flight.take(step)
        assert whole.rollouts.responses.lengths_N.tolist() == lengths_of(load, step)
        self.round += 1
        return seconds, whole.num_tokens


Found = dict[int, list[tuple[float, int]]]
"""By number of slices: seconds and whole tokens of each round."""


def measure_rank(runtime: Runtime, model: Path, load: Load, rounds: int) -> Found:
    """`rounds` rounds of each run, in turn, after those that fill it. Collective."""
    from megarlhf.config import RoleConfig, RolloutConfig
    from megarlhf.models.role import build_role
    from megarlhf.parallel.mesh import GroupCache
    from megarlhf.rollout.vllm.engine import VllmEngine

    section = RoleConfig.model_validate({"model": {"path": str(model), "dtype": "fp32"}})
    actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
    rollout = RolloutConfig.model_validate({"max_response_tokens": load.longest})
    engine = VllmEngine(rollout, actor, torch.float32, load.prompt)
    engine.update_weights(actor.shard, 0)
    runs = {slices: SlicedRun(load, engine, slices, first=max(SLICES) - slices) for slices in SLICES}
    for run in runs.values():
        while run.round < max(SLICES):  # the first draws all that is missing, and the others are not full yet
            run.next_round()
    found: Found = {slices: [] for slices in SLICES}
    for number in range(rounds):
        for slices in [*SLICES[number % len(SLICES) :], *SLICES[: number % len(SLICES)]]:
            found[slices].append(runs[slices].next_round())
    engine.close()
    return found


def summary(found: Found) -> dict[str, Any]:
    """Seconds per trained token by number of slices: those of all rounds over their tokens."""
    per_token = {
        slices: sum(seconds for seconds, _ in rounds) / sum(tokens for _, tokens in rounds)
        for slices, rounds in found.items()
    }
    best = min(per_token, key=lambda slices: per_token[slices])
    ratios = [
        (whole[0] / whole[1]) / (sliced[0] / sliced[1]) for whole, sliced in zip(found[1], found[best], strict=True)
    ]
    return {
        "rollout_speedup_long_tailed": per_token[1] / per_token[best],
        "best": best,
        "lowest": min(ratios),
        "highest": max(ratios),
        "median": statistics.median(ratios),
        "milliseconds_per_token": {str(slices): 1000 * value for slices, value in per_token.items()},
    }


def measure(sizes: Sizes, load: Load, rounds: int) -> dict[str, Any]:
    """All figures."""
    found = {int(slices): each for slices, each in on_two_ranks(measure_rank, sizes, load, rounds).items()}
    return {"rounds": rounds, **summary(found), "seconds_and_tokens": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=__doc__)
    parser.add_argument("--rounds", type=int, default=max(SLICES), help=f"a multiple of {max(SLICES)}")
    parser.add_argument("--small", action="store_true", help="a tiny model: to see whether this runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    sizes, load = (SMALL_MODEL, SMALL) if arguments.small else (MODEL, Load())
    result = {**machine("make bench-slices"), "model": dataclasses.asdict(sizes), "load": dataclasses.asdict(load)}
    result |= measure(sizes, load, arguments.rounds)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "model"}, indent=1))


if __name__ == "__main__":
    main()
