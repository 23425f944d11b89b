"""A small job run for real, its phases timed; and the same job rehearsed, its trace kept."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from time import perf_counter

import torch.distributed as dist

from megarlhf.config import RolloutConfig
from megarlhf.models.role import Role
from megarlhf.rehearsal.calibrate.stopwatch import undisturbed_clock
from megarlhf.rehearsal.cost_model.hardware import load_hardware
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.fakes.engine import GivenResponses
from megarlhf.rehearsal.fakes.phases import Steps, StopRehearsal
from megarlhf.rehearsal.program import Job, Rank, RankRecord
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.runtime import Runtime
from megarlhf.trainers.entries import import_entry
from megarlhf.trainers.run.factories import RunFactories

Place = tuple[int, str]
"""(step, phase)."""


def real_rank(runtime: Runtime, job: Job) -> dict[Place, tuple[float, float]]:
    """Run this rank of the job. Collective. Seconds by step and phase: undisturbed, and by the clock on the wall."""
    spent: dict[Place, tuple[float, float]] = {}
    now = [((0, "build"), undisturbed_clock(), perf_counter())]

    def moved(step: int, phase: str) -> None:
        place, *began = now[0]
        now[0] = (step, phase), undisturbed_clock(), perf_counter()
        before = spent.get(place, (0.0, 0.0))
        spent[place] = before[0] + now[0][1] - began[0], before[1] + now[0][2] - began[1]

    def engine(rollout: RolloutConfig, actor: Role, prompt_tokens: int, rows: int) -> RolloutEngine:
        return GivenResponses(actor, job.response_lengths)

    steps = Steps(job.num_steps, moved, lambda step: None)
    with contextlib.suppress(StopRehearsal):
        import_entry(job.command)(job.cfg, runtime, RunFactories(phases=steps.phases, engine=engine))
    return spent


def rehearsed_rank(job: Job, rank: int, hardware: str) -> RankRecord:
    """Rehearse one rank in this process, which must not be in a process group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    record = Rank(replace(job, rank=rank), Pricing(load_hardware(hardware), job.ranks_per_node)).run()
    dist.destroy_process_group()
    return record
