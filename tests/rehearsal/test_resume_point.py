"""What a rehearsal says of a resume point: the bytes of each rank's files and the memory while it is written, held
against a run that writes one.

Not covered: what rank 0 writes besides tensors; the path of a GPU, where a copy in host memory is written from.
"""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.rehearsal.cases import Case, job_of
from benchmarks.rehearsal.real_run import Seen, real_rank
from benchmarks.rehearsal.rehearsed_run import NoPrice, seen
from megarlhf.parallel.mesh import forget_scratch_buffer
from megarlhf.rehearsal.fakes.resume_point import PointSizes
from megarlhf.rehearsal.job import Job
from megarlhf.rehearsal.program import Rank
from megarlhf.resume.points.checkpointer import bytes_of
from megarlhf.runtime import Runtime

MOST = 0.02
HEADER = 8
"""Bytes by which headers of tensors of equal dimensions differ, as sizes are written in 1 to 5 bytes."""

ROLES = {"sft": {"actor"}, "rl": {"actor", "critic"}}
CASES = (
    Case(command="sft", world_size=2, dtype="bf16"),
    Case(command="rl", world_size=2, parallel={"tp": 2}, offload={"parameters": True, "optimizer": "stream"}),
    Case(command="rl", world_size=2, dtype="bf16", slices=3),
)


TABLE = "state/slices.pt"


def real(runtime: Runtime, job: Job) -> tuple[Seen, dict[str, int], int]:
    """What this rank has seen, the bytes of its file of each role, and those of responses that are under way."""
    found = real_rank(runtime, job)
    dist.barrier()
    (point,) = (job.cfg.run.dir / "resume").glob("step_*")  # type: ignore[attr-defined]
    files = point.glob(f"*/__{runtime.rank}_0.distcp")
    tables = bytes_of(torch.load(point / TABLE, weights_only=True)) if (point / TABLE).exists() else 0
    return found, {file.parent.name: os.stat(file).st_size for file in files}, tables


def rehearsed(runtime: Runtime, job: Job) -> tuple[Seen, PointSizes | None]:
    dist.destroy_process_group()
    record = Rank(replace(job, rank=runtime.rank), NoPrice()).run()
    dist.destroy_process_group()
    forget_scratch_buffer()
    return seen(record), record.resume_point


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_and_peak_are_those_of_a_real_point(case, ranks, tmp_path) -> None:
    """Each rank's file of each role but for its headers, and what it holds when the point begins."""
    job = job_of(replace(case, samples=4, layers=2), tmp_path, resume_point=True)
    waits = job.cfg.checkpoint.model_copy(update={"background": False})  # type: ignore[attr-defined]
    job = replace(job, cfg=job.cfg.model_copy(update={"checkpoint": waits}))
    write = case.num_steps, "checkpoint"
    wrote, told = (ranks.run(case.world_size, each, job) for each in (real, rehearsed))
    for (ran, files, tables), (heard, point) in zip(wrote, told, strict=True):
        assert point is None or point.tables == tables
        assert (tables > 0) == (case.slices > 1)
        assert heard.peaks[write] == pytest.approx(ran.peaks[write], rel=MOST)
        assert point is not None
        assert point.bytes_by_role.keys() == files.keys() == ROLES[case.command]
        assert point.host_bytes == 0
        for role, nbytes in point.bytes_by_role.items():
            assert 0 <= files[role] - nbytes <= HEADER * point.tensors_by_role[role], role
        # More than what is held before: what was in host memory has come back.
        offloaded = bool(case.offload)
        before = min(peak for (step, _), peak in heard.peaks.items() if step == write[0])
        assert case.slices > 1 or (heard.peaks[write] > 1.1 * before) == offloaded
