"""Writes a directory of sharded checkpoints while training goes on.

`start` makes Megatron-Core's save plan, brings what lies on a GPU to the host, and forks a process of each rank; the
fork is the snapshot, as memory that training changes afterwards is copied page by page. The process writes with torch's
own writer, syncs and digests its files. `poll` asks all ranks whether they are through, and then rank 0 completes the
directory. What fails on one rank fails on all, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.resume.role_state import ShardedState
from megarlhf.runtime import Runtime, synchronize
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import COMMON, CONFIG
from megarlhf.weights.checkpoint.formats.torch_dist.write import BACKENDS
from megarlhf.weights.checkpoint.staging import sync

log = logging.getLogger(__name__)

CHUNK = 1 << 22
WRITE_SECONDS = 3600.0
"""After which a writer that has not answered is taken for hanging."""


@dataclass(frozen=True)
class FileDigest:
    """Of a file of a resume point."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Content:
    """What one directory is to hold. Every rank hands in its own part; rank 0's files are written."""

    roles: Mapping[str, ShardedState]
    """Sharded state by folder."""
    commons: Mapping[str, Mapping[str, Any]]
    """What `common.pt` of each folder holds."""
    files: Mapping[str, Any]
    """Rank 0: what is saved by torch.save, by path."""


@dataclass(frozen=True)
class Outcome:
    """How a write has ended, the same on every rank."""

    error: str | None
    seconds: float
    """From start to end."""
    bytes: int = 0
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """On rank 0."""


@dataclass
class _Job:
    directory: Path
    metadata: dict[str, Metadata]
    """On rank 0, by folder."""
    commons: Mapping[str, Mapping[str, Any]]
    process: Any
    connection: Any
    started: float
    answer: tuple[str | None, Any] | None = None
    """(error, what was written)."""


class Writer:
    """Of one run; has at most one directory in work."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._job: _Job | None = None

    @property
    def busy(self) -> bool:
        """The same on every rank."""
        return self._job is not None

    def start(self, directory: Path, content: Content) -> None:
        """Collective. `directory` exists on rank 0 and is empty; what it will hold is fixed by the return."""
        assert self._job is None, "the last directory is not complete yet"
        started = time.monotonic()
        jobs: list[tuple[Path, SavePlan, MCoreSavePlanner]] = []
        metadata = {}
        for name, state in content.roles.items():
            with megatron_device(self._runtime.device):
                plan, planner, whole = self._plan(state)
            jobs.append((directory / name, plan, planner))
            if whole is not None:
                metadata[name] = whole
        synchronize(self._runtime.device)
        files = content.files if self._runtime.is_main else {}
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        process = context.Process(target=_write, args=(directory, jobs, files, theirs, os.getpid()))
        process.start()
        theirs.close()
        self._job = _Job(directory, metadata, content.commons, process, ours, started)

    def _plan(self, state: ShardedState) -> tuple[SavePlan, MCoreSavePlanner, Metadata | None]:
        """This rank's part of the plan, and on rank 0 what all ranks write. Collective."""
        by_key: dict[str, list[ShardedBase]] = defaultdict(list)
        for item in state.values():
            if is_main_replica(item.replica_id):
                if isinstance(item.data, torch.Tensor):
                    item.data = item.data.detach().to("cpu", non_blocking=True)
                by_key[getattr(item, "unique_key", None) or item.key].append(item)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(dict(by_key)), is_coordinator=self._runtime.is_main)
        local = planner.create_local_plan()
        plans: list[Any] | None = [None] * self._runtime.world_size if self._runtime.is_main else None
        dist.gather_object(local, plans, dst=0)
        metadata = None
        if plans is not None:
            _, metadata = planner.create_global_plan(plans)
        numbered = [local] * (self._runtime.rank + 1)
        mine = FileSystemWriter("unused").prepare_global_plan(numbered)[self._runtime.rank]
        return planner.finish_plan(mine), planner, metadata

    def poll(self, complete: Callable[[Mapping[str, FileDigest]], None], *, wait: bool = False) -> Outcome | None:
        """Collective. None while a rank is still writing. When all are through, rank 0 calls `complete` with the
        digests of all files, which makes the directory valid; what it raises fails the write on every rank."""
        job = self._job
        if job is None:
            return None
        answered = self._receive(job, wait=wait)
        flags = torch.tensor([int(answered), int(not (job.answer and job.answer[0]))], device=self._runtime.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        through, well = bool(flags[0]), bool(flags[1])
        if well and not through:
            return None
        self._job = None
        _end(job)
        outcome: list[Outcome | None] = [None]
        answers: list[Any] | None = [None] * self._runtime.world_size if self._runtime.is_main else None
        dist.gather_object(job.answer, answers, dst=0)
        if answers is not None:
            outcome = [self._complete(job, answers, complete)]
        dist.broadcast_object_list(outcome, src=0)
        return outcome[0]

    def _receive(self, job: _Job, *, wait: bool) -> bool:
        """Whether this rank's process has answered."""
        left = max(0.0, job.started + WRITE_SECONDS - time.monotonic())
        if job.answer is None and job.connection.poll(left if wait else 0):
            try:
                job.answer = job.connection.recv()
            except EOFError:
                job.process.join()
                job.answer = (f"the writing process died with status {job.process.exitcode}", None)
        if job.answer is None and time.monotonic() - job.started >= WRITE_SECONDS:
            job.answer = (f"nothing was heard of the writing process for {WRITE_SECONDS:.0f} s", None)
        return job.answer is not None

    def _complete(self, job: _Job, answers: list[Any], complete: Callable[[Mapping[str, FileDigest]], None]) -> Outcome:
        """On rank 0."""
        errors: dict[str, list[int]] = defaultdict(list)
        for rank, answer in enumerate(answers):
            if answer is not None and answer[0]:
                errors[answer[0]].append(rank)
        files: dict[str, FileDigest] = {}
        error = None
        if errors:
            error = "; ".join(f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in errors.items())
        else:
            try:
                for written in (answer[1] for answer in answers):
                    files |= written["files"]
                for name, metadata in job.metadata.items():
                    results = [answer[1]["results"][name] for answer in answers]
                    files |= _finish(job.directory, name, metadata, results, job.commons[name])
                complete(files)
            except (OSError, ValueError) as failure:
                error = str(failure)
        if error is not None:
            shutil.rmtree(job.directory, ignore_errors=True)
        size = sum(file.bytes for file in files.values())
        return Outcome(error=error, seconds=time.monotonic() - job.started, bytes=size, files=files)

    def abandon(self) -> None:
        """End what is in work; the directory stays incomplete. Not collective."""
        if self._job is not None:
            _end(self._job)
            self._job = None


def _end(job: _Job) -> None:
    job.connection.close()
    if job.answer is None or job.answer[0]:
        job.process.kill()
    job.process.join()
    job.process.close()


def _finish(
    directory: Path, name: str, metadata: Metadata, results: list[list[WriteResult]], common: Mapping[str, Any]
) -> dict[str, FileDigest]:
    """Write what makes a folder of `.distcp` files a checkpoint."""
    folder = directory / name
    FileSystemWriter(folder).finish(metadata, results)
    torch.save(dict(common), folder / COMMON)
    (folder / CONFIG).write_text(json.dumps(BACKENDS), encoding="ascii")
    for file in (COMMON, CONFIG):
        sync(folder / file)
    return {f"{name}/{file}": digest_of(folder / file) for file in (".metadata", COMMON, CONFIG)}


def _write(directory: Path, jobs: list[Any], files: Mapping[str, Any], answer: Any, parent: int) -> None:
    """The life of the writing process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing goes on writing when the rank has died
        if os.getppid() != parent:
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the rank, which decides what becomes of this
    gc.disable()  # tensors of the rank's device are not ours to free
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    with contextlib.suppress(OSError):
        os.nice(5)
    status = 0
    try:
        answer.send((None, _write_files(directory, jobs, files)))
    except Exception as error:  # noqa: BLE001 -- the rank reports it
        status = 1
        with contextlib.suppress(Exception):
            answer.send((f"{type(error).__name__}: {error}", None))
    answer.close()
    os._exit(status)  # nothing that the rank has registered for its end is to run here


def _write_files(directory: Path, jobs: list[Any], files: Mapping[str, Any]) -> dict[str, Any]:
    results: dict[str, list[WriteResult]] = {}
    written: list[Path] = []
    for folder, plan, planner in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        results[folder.name] = []
        if plan.items:
            results[folder.name] = FileSystemWriter(folder, sync_files=True).write_data(plan, planner).value()
            written.append(folder / f"{plan.storage_data.prefix}0.distcp")
    for name, value in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
        sync(path)
        written.append(path)
    digests = {str(path.relative_to(directory)): digest_of(path) for path in written}
    return {"results": results, "files": digests}


def digest_of(path: Path) -> FileDigest:
    """Of a file as it lies there."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size, digest.hexdigest())
