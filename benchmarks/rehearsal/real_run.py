"""A small job run for real: the command's own `run` on real tensors and gloo ranks, followed in memory and messages.

Memory: every allocation and release of torch's CPU allocator, as torch's profiler reports them, summed in the order of
their times; the peak of a phase is the largest sum while it is open. On a CPU this is one allocator for what is on the
device elsewhere and for what stays on the host.
Messages: what reaches the process groups (`recorded.py`).
The weights are random numbers in place of a checkpoint's, and responses have given lengths in place of an engine's:
both as in the rehearsal, so that what is compared is the trainer, and where a case has an engine the way of the weights
into it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rehearsal.recorded import BACKEND, Message, Recorder, join_again
from megarlhf.config import RolloutConfig
from megarlhf.models.build import ModelShard
from megarlhf.models.experts import Router
from megarlhf.models.role import Role
from megarlhf.parallel.device_memory import HostMemory
from megarlhf.parallel.mesh import forget_scratch_buffer
from megarlhf.rehearsal.cost_model.engine_time import stated_tokens
from megarlhf.rehearsal.fake_device.routing import Routing
from megarlhf.rehearsal.fakes.engine import EngineBudget, GivenResponses, RehearsedEngine
from megarlhf.rehearsal.fakes.phases import Steps, StopRehearsal
from megarlhf.rehearsal.fakes.weights import UninitializedWeights
from megarlhf.rehearsal.job import Job
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.factory import engine_dtype
from megarlhf.runtime import Runtime
from megarlhf.trainers.entries import import_entry
from megarlhf.trainers.run.factories import RunFactories

MARK = "PHASE "
Place = tuple[int, str]
"""(step, phase)."""


@dataclass(frozen=True)
class Seen:
    """Of one rank, real or rehearsed."""

    rank: int
    peaks: dict[Place, int]
    """Bytes."""
    counts: dict[Message, int]
    nbytes: dict[Message, int]
    ends: dict[Place, int] = field(default_factory=dict)
    """Bytes that live when the phase is left last: a release that was not seen would show."""


class RandomNumbers(UninitializedWeights):
    """Weights of a real run that has no checkpoint."""

    def load(self, shard: ModelShard, model: Any, *, seed: int, new_head: bool) -> None:
        super().load(shard, model, seed=seed, new_head=new_head)
        with torch.no_grad():
            for name, parameter in shard.parameters().items():
                parameter.fill_(1.0) if "norm" in name else parameter.uniform_(-0.05, 0.05)


class Elsewhere(HostMemory):
    """Host memory that torch's allocator does not see: on a CPU that is the device's."""

    def take(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))


def real_rank(runtime: Runtime, job: Job, plant: Callable[[Place], None] | None = None) -> Seen:
    """Run this rank of the job. Collective. `plant` is called at each change of phase; a test does there what has to be
    noticed."""
    now: list[Place] = [(0, "build")]
    recorder = Recorder(lambda: now[0])
    join_again(recorder)
    forget_scratch_buffer()
    runtime = replace(runtime, backend=BACKEND)

    def moved(step: int, phase: str) -> None:
        now[0] = step, phase
        with torch.profiler.record_function(f"{MARK}{step} {phase}"):
            pass
        if plant is not None:
            plant(now[0])

    def engine(rollout: RolloutConfig, actor: Role, prompt_tokens: int, rows: int) -> RolloutEngine:
        if job.bare_engine:
            return GivenResponses(actor, job.response_lengths)
        return real_engine(job, rollout, actor, prompt_tokens)

    steps = Steps(job.num_steps, moved, lambda step: None)
    parts = RunFactories(phases=steps.phases, weights=RandomNumbers(lambda shard: None), engine=engine, host=Elsewhere)
    run = import_entry(job.command)
    recorder.on = True
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
        routed(job.routing),
        contextlib.suppress(StopRehearsal),
    ):
        run(job.cfg, runtime, parts)
    recorder.on = False
    peaks, ends = peaks_of(profile)
    return Seen(runtime.rank, peaks, dict(recorder.counts), dict(recorder.nbytes), ends)


def real_engine(job: Job, rollout: RolloutConfig, actor: Role, prompt_tokens: int) -> RolloutEngine:
    """vLLM's weights as real tensors where the table says that vLLM has them, into which our resharder really moves the
    actor's, with a certificate; nothing is generated."""

    def refused(why: str) -> None:
        raise RuntimeError(why)

    return RehearsedEngine(
        rollout,
        actor,
        engine_dtype(rollout, actor),
        prompt_tokens,
        lengths=job.response_lengths,
        memory=EngineBudget(device_bytes=0, reserved_bytes=0, activation_bytes=0, held_bytes=lambda: 0),
        estimate=lambda work, shape, cache_bytes: stated_tokens(work)[1],  # as the job states its speed
        on_refusal=refused,
    )


@contextlib.contextmanager
def routed(routing: Routing) -> Iterator[None]:
    """Inside, routers send tokens where the rehearsal says: the scores of those experts are 1, the others 0."""
    original = Router.gating

    def gating(self: Router, hidden_SBH: Tensor) -> Tensor:
        logits = original(self, hidden_SBH)
        with torch.no_grad():
            scores_TE = logits.detach().view(-1, logits.size(-1)).zero_()
            scores_TE.scatter_(1, routing.experts_of(*scores_TE.shape, self.topk), 1.0)
        return logits

    Router.gating = gating  # type: ignore[method-assign]
    try:
        yield
    finally:
        Router.gating = original  # type: ignore[method-assign]


def peaks_of(profile: Any) -> tuple[dict[Place, int], dict[Place, int]]:
    """Most bytes that live in each phase, and bytes when it is left; from the allocator's events."""
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live, place = 0, None
    peaks: dict[Place, int] = {}
    ends: dict[Place, int] = {}
    for event in events:
        if event.name().startswith(MARK):
            step, _, phase = event.name().removeprefix(MARK).partition(" ")
            place = int(step), phase
        elif event.name() == "[memory]":
            live += event.nbytes()
        if place is not None:
            peaks[place] = max(peaks.get(place, 0), live)
            ends[place] = live
    return peaks, ends
