"""What a rank does: the jobs of a launch, one after the other. `python -m tools.gpu_check.rank LAUNCH`.

Started plainly it starts the launch's ranks on this machine; under srun or torchrun it is one of them. After each job
the first rank appends a line to `results.jsonl` beside the launch; a rank that fails writes `failed.RANK.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megarlhf import runtime as runtimes
from megarlhf.commands import launch as launching
from megarlhf.config import RLConfig, RolloutConfig, SFTConfig
from megarlhf.experience import Experience
from megarlhf.models import build
from megarlhf.models.build import ModelShard
from megarlhf.models.role import Role
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.planning.machine.nodes import check_nodes, require_gpus
from megarlhf.rehearsal.fakes.engine import GivenResponses as ConstantResponses
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.factory import make_engine
from megarlhf.runtime import RankInfo, Runtime
from megarlhf.trainers.entries import import_entry
from megarlhf.trainers.rl import update as rl_updates
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.weights.checks.certificate import Certificate
from tools.gpu_check.cases import PROGRAM, Job, Launch
from tools.gpu_check.given import GivenResponses
from tools.gpu_check.memory import AllocatorMeter, MeasuredPhases, MemoryMeter

CONFIGS: Mapping[str, type[SFTConfig] | type[RLConfig]] = {"sft": SFTConfig, "rl": RLConfig}
COLLECTIVE_SECONDS = 120.0
SHOWN_ADVANTAGES = 24

Join = Callable[[str], AbstractContextManager[Runtime]]
"""Given a job's name, all ranks join a run of their own, and leave it when the job is done."""
MakeMeter = Callable[[Runtime], MemoryMeter | None]


def device_meter(runtime: Runtime) -> MemoryMeter | None:
    """Of a GPU; None on a CPU, whose allocator does not count."""
    return AllocatorMeter(runtime.device) if runtimes.counts_allocations(runtime.device) else None


@dataclass
class Seen:
    """What a job shows beside its metrics."""

    certificates: list[Certificate] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)


def run_launch(join: Join, path: Path, make_meter: MakeMeter = device_meter) -> None:
    """Every job of the launch, each in a run that its ranks join and leave."""
    launch = Launch.load(path)
    for number, job in enumerate(launch.jobs):
        began = time.monotonic()
        with join(f"{job.name} {job.layers}") as runtime:
            assert runtime.world_size == launch.ranks, f"{launch.ranks} ranks were asked for, got {runtime.world_size}"
            try:
                result = run_job(runtime, job, make_meter, look_at_nodes=not number)
            except BaseException as error:
                _tell_failure(path, runtime, job, error)
                raise
            if runtime.is_main:
                line = {"job": job.name, "layers": job.layers, "seconds": time.monotonic() - began, **result}
                with (path.parent / "results.jsonl").open("a") as results:
                    results.write(json.dumps(line) + "\n")


def _tell_failure(path: Path, runtime: Runtime, job: Job, error: BaseException) -> None:
    report = {
        "job": job.name,
        "layers": job.layers,
        "when": time.time(),
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exc(),
    }
    (path.parent / f"failed.{runtime.rank}.json").write_text(json.dumps(report, indent=1) + "\n")


def run_job(runtime: Runtime, job: Job, make_meter: MakeMeter, *, look_at_nodes: bool) -> dict[str, Any]:
    """The command's own run, as configured. Returns, on the first rank, what it has shown."""
    cfg, seen = CONFIGS[job.command].model_validate(job.config), Seen()
    if look_at_nodes:
        for note in check_nodes(cfg, runtime):
            print(note, file=sys.stderr)
    meter = make_meter(runtime) if job.measured else None
    measured = MeasuredPhases(meter) if meter is not None else None
    with _layers(job), _noted_advantages(seen):
        run = import_entry(job.command)
        phases = RunFactories().phases if measured is None else measured.steps.phases
        run(cfg, runtime, RunFactories(phases=phases, engine=partial(_engine, job, runtime, seen)))
    peaks = None
    if measured is not None:
        by_rank: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(by_rank, [(peak.step, peak.phase, peak.nbytes) for peak in measured.peaks()])
        peaks = dict(enumerate(by_rank))
    if not runtime.is_main:
        return {}
    return {
        "metrics": read_metrics(cfg.run.dir),
        "advantages": seen.advantages,
        "certificates": [{"version": each.version, "digest": each.digest} for each in seen.certificates],
        "peaks": peaks,
        "kept_bytes": getattr(meter, "kept", 0),
    }


@contextlib.contextmanager
def _layers(job: Job) -> Iterator[None]:
    """Inside, the layers are those that the job asks for: a run has no choice, and takes the machine's best."""
    if job.layers == "auto":
        yield
        return
    with mock.patch.object(build, "has_transformer_engine", return_value=False):
        yield


@contextlib.contextmanager
def _noted_advantages(seen: Seen) -> Iterator[None]:
    """Inside, the first advantages of each step are taken down: no metric has them."""
    add = rl_updates.add_advantages

    def noting(*arguments: Any, **options: Any) -> Experience:
        experience = add(*arguments, **options)
        whole = experience.replicated()
        seen.advantages += whole.columns["advantages"].values_T[:SHOWN_ADVANTAGES].tolist()
        return experience

    with mock.patch.object(rl_updates, "add_advantages", noting):
        yield


def _engine(
    job: Job,
    runtime: Runtime,
    seen: Seen,
    rollout: RolloutConfig,
    actor: Role,
    max_prompt_tokens: int,
    micro_batch_samples: int,
) -> RolloutEngine:
    if job.constant:
        return ConstantResponses(actor, Constant(job.constant))
    if job.given:
        return GivenResponses(runtime)
    engine = make_engine(rollout, actor, max_prompt_tokens, micro_batch_samples)
    verify = engine.verify_weights

    def noting(actor: ModelShard) -> Certificate | None:
        certificate = verify(actor)
        seen.certificates += [] if certificate is None else [certificate]
        return certificate

    engine.verify_weights = noting  # type: ignore[method-assign]
    return engine


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of the ranks, or of this one."""
    argv = list(sys.argv[1:] if argv is None else argv)
    path = Path(argv[0])
    info = runtimes.detect_rank(os.environ)
    if info is None:
        return launching.local_ranks(Launch.load(path).ranks, argv, PROGRAM)
    launching.silence_libraries()
    require_gpus(info.rank)
    run_launch(partial(_joined, info, _store(info)), path)
    return 0


def _store(info: RankInfo) -> dist.Store:
    """One for all jobs: to wait until a port is free again takes longer than a job."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        info.world_size,
        is_master=info.rank == 0 and runtimes.STORE_IS_THERE not in os.environ,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )


@contextlib.contextmanager
def _joined(info: RankInfo, store: dist.Store, name: str) -> Iterator[Runtime]:
    """The communicators of one job are given back before the next one. Not after a failure: leaving may hang."""
    own = dist.PrefixStore(name, store)
    yield runtimes.initialize(info, seed=0, timeout_seconds=COLLECTIVE_SECONDS, store=own)
    if dist.is_initialized():
        dist.barrier()
    runtimes.shutdown()


if __name__ == "__main__":
    sys.exit(main())
