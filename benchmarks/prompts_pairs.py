"""Supervised steps in `make bench-prompts` and `make bench-trl`, as a child: of a reward model, DPO or SFT.

{"command": "round", "way": "shared 2048"}   ->   seconds of a step
{"command": "look", "way": "shared 2048"}    ->   its floating-point operations and its memory
{"command": "memory"}                        ->   the most memory so far
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import Peak
from benchmarks.packing_children import Parent
from benchmarks.packing_ours import timed
from benchmarks.packing_workload import Sizes, Workload, make_workload
from benchmarks.prompts_work import looked_at
from megarlhf.config import DPOConfig, RMConfig, SFTConfig
from megarlhf.data.sample_types import PairSample, SFTSample
from megarlhf.models.role import build_role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.mesh import GroupCache
from megarlhf.runtime import RankInfo, Runtime, initialize
from megarlhf.trainers.run.skipped_steps import Failures, StepGuard, Update
from megarlhf.trainers.supervised.dpo import PreferenceOptimisation
from megarlhf.trainers.supervised.loop import train_on
from megarlhf.trainers.supervised.rm import RewardModelling
from megarlhf.trainers.supervised.sft import SupervisedFineTuning

STEPS = 1_000_000
"""Of the schedule; no benchmark makes as many."""


class Supervised:
    """One configuration's role, trained a step further by each round, always on the same mini-batch."""

    def __init__(self, options: dict[str, Any], train: dict[str, Any], runtime: Runtime, out: str) -> None:
        self._objective = objective_of(options, train, out)
        objective, cache = self._objective, GroupCache(runtime)
        self._seconds: dict[str, float] = defaultdict(float)
        role = build_role(
            objective.role_name,
            objective.section,
            objective.head,
            cache,
            seed=0,
            num_optimizer_steps=STEPS,
            new_head=True,
        )
        objective.build_frozen(cache, role)
        self._role = timed(role, self._clock)
        self._phases = Phases()
        self._bad_steps = StepGuard(objective.cfg.train, Failures.of(objective.cfg, objective.command), self._phases)
        workload = make_workload(options["workload"], Sizes(**options["sizes"]))
        self._samples: list[Any] = texts_of(workload) if options["command"] == "sft" else pairs_of(workload)
        self._steps = 0

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def round(self) -> dict[str, Any]:
        """A step."""
        self._seconds.clear()
        update = Update(self._steps, None, range(len(self._samples)))
        self._steps += 1
        start, cpu = time.perf_counter(), time.process_time()
        metrics = train_on(self._objective, self._role, self._samples, update, self._bad_steps, self._phases)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return {
            "phase_seconds": seconds,
            "phase_cpu_seconds": cpu,
            "parts": {**self._seconds, "other": seconds - sum(self._seconds.values())},
            "loss": metrics["loss"],
            "grad_norms": [metrics["grad_norm"]],
            "prompts_computed": metrics.get("prompts_computed"),
        }

    def look(self) -> dict[str, Any]:
        """What a step computes, and its memory."""
        return looked_at(self.round)


def pairs_of(workload: Workload) -> list[PairSample]:
    """Of each prompt's two responses the first is the chosen one."""
    chosen, rejected = workload.responses[0::2], workload.responses[1::2]
    return [PairSample(*each) for each in zip(workload.prompts, chosen, rejected, strict=True)]


def texts_of(workload: Workload) -> list[SFTSample]:
    """A response to each prompt."""
    rows = zip(workload.prompts, workload.responses, strict=True)
    return [SFTSample.of_response(prompt + response, len(prompt)) for prompt, response in rows]


def objective_of(
    options: dict[str, Any], train: dict[str, Any], out: str
) -> RewardModelling | PreferenceOptimisation | SupervisedFineTuning:
    """`rm`, `dpo` or `sft` on the model, with the optimizer of `packing_ours`."""
    role = {
        "model": {"path": options["model"]},
        "optim": {"lr": options["lr"], "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "clip_grad": 1.0},
    }
    sizes = Sizes(**options["sizes"])
    tree = {
        "run": {"dir": out},
        "data": {"train": "unused"},
        "train": {"num_steps": STEPS, "mini_batch_samples": sizes.prompts, **train},
    }
    if options["command"] == "rm":
        return RewardModelling(RMConfig.model_validate({**tree, "reward_model": role}))
    if options["command"] == "sft":
        return SupervisedFineTuning(SFTConfig.model_validate({**tree, "actor": role}))
    return PreferenceOptimisation(
        DPOConfig.model_validate({**tree, "actor": role, "reference": {"model": role["model"]}})
    )


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    runtime = initialize(RankInfo(), seed=0)
    torch.set_num_threads(options["threads"])
    peak = Peak() if options.get("memory") else None
    with tempfile.TemporaryDirectory() as out:
        ways = {
            way: Supervised(options, train, runtime, str(Path(out) / way)) for way, train in options["ways"].items()
        }
        parent.say({"threads": torch.get_num_threads(), "ways": options["ways"]})
        parent.serve(
            {
                "round": lambda way: ways[way].round(),
                "look": lambda way: ways[way].look(),
                "memory": lambda: peak.so_far() if peak else {},
            }
        )
        if peak:
            peak.close()


if __name__ == "__main__":
    main()
