"""What it is worth to share samples well: python -m benchmarks.rollout (`make bench-rollout`).

Two engines of vLLM's, one rank and one thread each, draw the samples of a step in each way of `rollout.balance`, in
turn, in one pair of processes. Responses have given lengths with a long tail: a prompt has a typical one (lognormal),
its samples are spread around it, and each round draws the spread anew. A way's seconds are those until both engines are
done.

fixed               equal numbers of samples
length              all dealt before, and nothing is known but the mean length: as in the first epoch
length_known        the same, and how long the responses to each prompt were in the round before: as in later epochs
on_demand           three quarters dealt before, the rest on demand; nothing known
on_demand_known     the same, the longest prompts first

Reported of each: its seconds over those of `fixed` in the same round (median, lowest, highest), and which share of its
seconds an engine was idle.
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

RESULT = ROOT / "benchmarks" / "results" / "rollout.json"
WAYS = {
    "fixed": ("fixed", False),
    "length": ("length", False),
    "length_known": ("length", True),
    "on_demand": ("on_demand", False),
    "on_demand_known": ("on_demand", True),
}
"""`rollout.balance`, and whether the prompts' lengths are known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Of one step."""

    prompts: int = 32
    per_prompt: int = 4
    at_once: int = 8
    """Sequences that an engine runs at most."""
    mean: int = 40
    longest: int = 256
    sigma: float = 0.9
    """Of the logarithm of a prompt's typical length."""
    spread: float = 0.4
    """The same of a response around it."""


MODEL = Sizes(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=704, vocab=2048)
SMALL = Load(prompts=6, per_prompt=2, at_once=2, mean=8, longest=32)
SMALL_MODEL = Sizes(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=256)


def lengths_of(load: Load, number: int) -> list[int]:
    """Response tokens by row in a round; row n answers prompt n // per_prompt."""
    rng, spread = random.Random(0), random.Random(number + 1)
    mu = math.log(load.mean) - (load.sigma**2 + load.spread**2) / 2
    typical = [rng.gauss(mu, load.sigma) for _ in range(load.prompts)]
    drawn = [math.exp(t + spread.gauss(0, load.spread)) for t in typical for _ in range(load.per_prompt)]
    return [min(max(1, round(length)), load.longest) for length in drawn]


class Engines:
    """This rank's part of the two engines, with the weights of an actor."""

    def __init__(self, runtime: Runtime, model: Path, load: Load) -> None:
        from megarlhf.config import RoleConfig, RolloutConfig
        from megarlhf.models.role import build_role
        from megarlhf.parallel.mesh import GroupCache
        from megarlhf.rollout.vllm.engine import VllmEngine

        self.load, rng = load, random.Random(1)
        section = RoleConfig.model_validate({"model": {"path": str(model), "dtype": "fp32"}})
        actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
        options = {"max_response_tokens": load.longest, "vllm": {"args": {"max_num_seqs": load.at_once}}}
        self.rollout = RolloutConfig.model_validate(options)
        self.engine = VllmEngine(self.rollout, actor, torch.float32, 40)
        self.engine.update_weights(actor.shard, 0)
        tokens = [[rng.randrange(4, 200) for _ in range(rng.randint(8, 40))] for _ in range(load.prompts)]
        self.prompts = [torch.tensor(prompt) for prompt in tokens for _ in range(load.per_prompt)]

    def seconds(self, way: str, number: int) -> tuple[float, float]:
        """Seconds of the rollout, and those that an engine was idle, on average."""
        from megarlhf.rollout.balance import SeenLengths
        from megarlhf.rollout.responses import Sampling

        balance, known = WAYS[way]
        lengths = lengths_of(self.load, number)
        sampling = Sampling(max_tokens=self.load.longest, end_ids=(3,))

        self.engine._rollout = self.rollout.model_copy(update={"balance": balance})
        self.engine._seen = SeenLengths(self.load.prompts if known else 0)
        self.engine._seen.record(self.prompts, lengths_of(self.load, number - 1))
        with planted(lengths):
            dist.barrier()
            began = time.perf_counter()
            rollouts = self.engine.generate(self.prompts, list(range(len(self.prompts))), sampling)
            seconds = time.perf_counter() - began
        assert rollouts.responses.lengths_N.tolist() == lengths
        return seconds, rollouts.idle_seconds


Found = dict[str, list[tuple[float, float]]]
"""By way: seconds and idle seconds of each round."""


def measure_rank(runtime: Runtime, model: Path, load: Load, rounds: int) -> Found:
    """All rounds, and one before them that warms up. Collective."""
    engines = Engines(runtime, model, load)
    found: Found = {way: [] for way in WAYS}
    ways = list(WAYS)
    for way in ways:
        engines.seconds(way, 0)
    for number in range(1, rounds + 1):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(engines.seconds(way, number))
    engines.engine.close()
    return found


def measure(model_sizes: Sizes, load: Load, rounds: int) -> dict[str, Any]:
    """All figures."""
    found = on_two_ranks(measure_rank, model_sizes, load, rounds)
    return {"rounds": rounds, "response_tokens": sum(lengths_of(load, 1)), "ways": summary(found)}


def summary(found: Found) -> dict[str, Any]:
    """By way."""
    fixed = [seconds for seconds, _ in found["fixed"]]
    ways = {}
    for way, drawn in found.items():
        ratios = [seconds / base for (seconds, _), base in zip(drawn, fixed, strict=True)]
        ways[way] = {
            "over_fixed": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "seconds": statistics.median(seconds for seconds, _ in drawn),
            "idle_fraction": statistics.median(idle / seconds for seconds, idle in drawn),
        }
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="a tiny model: to see whether this runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    sizes, load = (SMALL_MODEL, SMALL) if arguments.small else (MODEL, Load())
    result = {**machine("make bench-rollout"), "model": dataclasses.asdict(sizes), "load": dataclasses.asdict(load)}
    result |= measure(sizes, load, arguments.rounds)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "model"}, indent=1))


if __name__ == "__main__":
    main()
