"""What resume points cost: python -m benchmarks.resume (`make bench-resume`).

In this process: a role of a small Llama is trained for a few optimizer steps a round; at one border a point is written
while training goes on, at another training waits for it; the two take turns. Reported are the seconds that training
stands still at that border, how much longer the steps take while a point is written, and bytes.

In processes of their own: `megarlhf sft` on the same model, from the start of the process to the first optimizer step:
of a fresh run, and of a run that goes on. The two take turns as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.faults.processes import Command
from benchmarks.faults.runs import has_step
from benchmarks.machine import ROOT, machine
from benchmarks.packing_workload import Sizes, write_model
from megarlhf.config import CheckpointConfig, RoleConfig
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.resume.points.checkpointer import Checkpointer
from megarlhf.resume.points.point import Position, find_points, read_manifest
from megarlhf.resume.points.restore import Identity
from megarlhf.resume.signals import StopRequest
from megarlhf.runtime import RankInfo, Runtime, initialize, shutdown
from megarlhf.trainers.supervised.sft import NextTokenLoss

SIZES = Sizes(vocab=8192, hidden=512, layers=8, heads=8, kv_heads=8, intermediate=1408)
SMALL = Sizes(vocab=64, hidden=32, layers=2, heads=2, kv_heads=2, intermediate=64)
STEPS_BETWEEN = 3
"""Steps from a border with a point to the next one; the first of them runs beside the writing process."""
WAYS = {"background": True, "waiting": False}


class Bench:
    """A role, the steps that train it, and a writer of resume points for each way."""

    def __init__(self, runtime: Runtime, model: Path, work: Path, tokens: int) -> None:
        section = RoleConfig.model_validate({"model": {"path": str(model)}, "optim": {"lr": 1e-4}})
        self.role: Role = build_role("actor", section, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1000)
        self._runtime, self._work, self._steps = runtime, work, 0
        batch = torch.randint(4, 60, (4, tokens), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(batch, dtype=torch.bool)
        mask[:, 0] = False
        self._batch = MicroBatch(batch, {"response_mask": mask})
        self._loss = NextTokenLoss(denominator=int(mask.sum()), vocabulary=self.role.shard.vocabulary())
        self._writers = {way: self._writer(way, background) for way, background in WAYS.items()}

    def _writer(self, way: str, background: bool) -> Checkpointer:
        cfg = CheckpointConfig(every=1, every_minutes=0, keep=1, background=background)
        identity = Identity("sft", "", {}, {}, {}, {}, {}, {}, lambda config: [])
        return Checkpointer(
            self._runtime, self._work / way, cfg, [self.role], {}, identity, StopRequest(), note=lambda text: None
        )

    def step(self) -> float:
        """Seconds of an optimizer step."""
        start = time.perf_counter()
        self.role.optimizer_step(self.role.accumulate([self._batch], self._loss).sums, lambda sums, norm: "")
        self._steps += 1
        return time.perf_counter() - start

    def round(self, way: str) -> dict[str, float]:
        """A border at which a point is written; seconds that training stands still, and of the steps around it."""
        before = [self.step() for _ in range(STEPS_BETWEEN)]
        writer, start = self._writers[way], time.perf_counter()
        writer.boundary_reached(Position(self._steps))
        still = time.perf_counter() - start
        beside = self.step()
        writer.finish(last_boundary=False)
        return {
            "standing_still": still,
            "complete": time.perf_counter() - start,
            "step_before": statistics.median(before),
            "step_beside": beside,
        }

    def sizes(self) -> dict[str, int]:
        """Of the state that a run needs (parameters and optimizer), and of what lies on the disk."""
        assert self.role.trainer is not None
        parameters = [p for p in self.role.shard.module.parameters() if p.requires_grad]
        optimizer = [
            value
            for state in self.role.trainer.optimizer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        manifest = read_manifest(find_points(self._work / "background")[-1])
        return {
            "parameters": sum(p.numel() for p in parameters),
            "state": sum(tensor.nbytes for tensor in [*parameters, *optimizer]),
            "written": sum(file["bytes"] for file in manifest["files"].values()),
        }


def first_steps(model: Path, work: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds from the start of the process to the first line of metrics: of a fresh run, and of one that goes on."""
    data = work / "data.jsonl"
    words = [f"w{n}" for n in range(10)]
    data.write_text("".join(json.dumps({"prompt": word, "response": " ".join(words)}) + "\n" for word in words * 20))
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        run = work / f"run{number}"
        tree = {
            "run": {"dir": str(run)},
            "actor": {"model": {"path": str(model)}},
            "data": {"train": str(data), "max_prompt_tokens": 16, "max_response_tokens": 32},
            "train": {"num_steps": 1000, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 256},
            "checkpoint": {"every": 2, "every_minutes": 0},
        }
        file = work / f"run{number}.yaml"
        file.write_text(yaml.safe_dump(tree))
        for kind in ("fresh", "resumed"):
            rows = 0
            if kind == "resumed":
                rows = find_points(run)[-1].position.step
                metrics = run / "metrics.jsonl"  # of the steps that will be done again, no line counts
                metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:rows]))
            start = time.monotonic()
            command = Command(["sft", "-c", str(file)], work / f"{kind}.log")
            assert command.wait_until(partial(has_step, run, rows + 1)), command.said
            seconds[kind].append(time.monotonic() - start)
            assert kind == "fresh" or f"from resume/step_{rows:06d}" in command.said, command.said
            if kind == "fresh":
                assert command.wait_until(lambda run=run: find_points(run)), command.said
            command.kill()
        shutil.rmtree(run)
    return dict(seconds)


def measure(sizes: Sizes, rounds: int, starts: int) -> dict[str, Any]:
    """All figures."""
    runtime = initialize(RankInfo(), seed=0)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        work = Path(folder)
        model = write_model(work / "model", sizes)
        torch.set_num_threads(1)
        bench = Bench(runtime, model, work, tokens=64)
        for way in WAYS:
            bench.round(way)  # Adam's state and the plan are made
        found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
        for number in range(rounds):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                for name, seconds in bench.round(way).items():
                    found[way][name].append(seconds)
        bytes_ = bench.sizes()
        starts_seconds = first_steps(model, work, starts) if starts else {}
    shutdown()
    still = {way: statistics.median(found[way]["standing_still"]) for way in WAYS}
    beside, before = (found["background"][name] for name in ("step_beside", "step_before"))
    result: dict[str, Any] = {
        "bytes": bytes_,
        "written_over_state": bytes_["written"] / bytes_["state"],
        "standing_still_seconds": {way: _spread(found[way]["standing_still"]) for way in WAYS},
        "background_over_waiting": still["background"] / still["waiting"],
        "complete_seconds": {way: _spread(found[way]["complete"]) for way in WAYS},
        "step_beside_a_write_over_step": statistics.median(b / a for a, b in zip(before, beside, strict=True)),
    }
    if starts_seconds:
        result["first_step_seconds"] = {kind: _spread(values) for kind, values in starts_seconds.items()}
        pairs = zip(starts_seconds["resumed"], starts_seconds["fresh"], strict=True)
        result["resumed_over_fresh"] = statistics.median(resumed / fresh for resumed, fresh in pairs)
    return result


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--starts", type=int, default=4, help="processes of each kind; 0: none")
    parser.add_argument("--small", action="store_true", help="a tiny model: to see whether this runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/resume.json")
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    sizes = SMALL if arguments.small else SIZES
    result = {**machine("make bench-resume"), "model": dataclasses.asdict(sizes)}
    result |= measure(sizes, arguments.rounds, arguments.starts)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "model"}, indent=1))


if __name__ == "__main__":
    main()
