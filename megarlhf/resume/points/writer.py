"""Writes a directory of sharded checkpoints while training goes on.

`start` makes Megatron-Core's save plan, copies what is on a GPU to the host, and forks a process on each rank. The fork
is the snapshot: the kernel copies each page that training changes afterwards. The process writes with torch's own
writer, syncs and digests its files, and leaves a note of them in the directory. The process of rank 0 waits for the
notes of all ranks, completes the directory and renames it. That takes no collective, so a point is complete as soon as
its bytes are there, however long the present step of training takes. `poll` returns the outcome. A failure on one rank
is a failure on all, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map

from megarlhf.atomic_write import atomic_write, sync
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.resume.points import point
from megarlhf.resume.points.file_digest import FileDigest, digest_of
from megarlhf.resume.points.point import Point
from megarlhf.resume.points.sharded_state import ShardedState
from megarlhf.resume.signals import STOP_SIGNALS
from megarlhf.runtime import Runtime, synchronize
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import COMMON, CONFIG
from megarlhf.weights.checkpoint.formats.torch_dist.write import BACKENDS

log = logging.getLogger(__name__)

NOTES = ".notes"
"""Folder of notes, in which each rank's process lists what it has written; removed when the directory is complete."""
FULL = 1 << 20
"""A disk with fewer free bytes is full."""
POLL_SECONDS = 0.02
WRITE_SECONDS = 3600.0
"""A writer that has not answered for so long is taken for hanging."""


@dataclass(frozen=True)
class Content:
    """Content of one directory. Every rank hands in its own part; only rank 0's `files` are written."""

    roles: Mapping[str, ShardedState]
    """Sharded state by folder."""
    commons: Mapping[str, Mapping[str, Any]]
    """Content of `common.pt`, by folder."""
    files: Mapping[str, Any]
    """Objects for torch.save, by path; texts and bytes are written as they are. Rank 0 only."""


@dataclass(frozen=True)
class WriteOutcome:
    """Outcome of a write, the same on every rank."""

    error: str | None
    seconds: float
    """Time from the start until `poll` saw the end."""
    bytes: int = 0
    """Size of all files."""


@dataclass
class _Job:
    directory: Path
    process: Any
    connection: Any
    started: float
    answer: tuple[str | None, int] | None = None
    """(error, bytes of the directory: rank 0 only)."""


@dataclass(frozen=True)
class _Note:
    """List of what the process of a rank has written."""

    results: dict[str, list[WriteResult]]
    """Results by folder."""
    files: dict[str, FileDigest]


@dataclass(frozen=True)
class _Completion:
    """Work of rank 0's process once all notes are there."""

    ranks: int
    metadata: Mapping[str, Metadata]
    """Metadata by folder."""
    commons: Mapping[str, Mapping[str, Any]]
    complete: Callable[[Mapping[str, FileDigest]], None]


class PointWriter:
    """Writer of one run; writes at most one directory at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._job: _Job | None = None

    def make_room(self, directory: Path, size: int, spare: Sequence[Point]) -> str | None:
        """Call `point.make_room`, on rank 0."""
        return point.make_room(directory, size, spare)

    def to_first(self, value: Any) -> list[Any] | None:
        """Gather a value of every rank on rank 0. Collective."""
        values: list[Any] | None = [None] * self._runtime.world_size if self._runtime.is_main else None
        dist.gather_object(value, values, dst=0)
        return values

    @property
    def busy(self) -> bool:
        """Tell whether a directory is being written; the same on every rank."""
        return self._job is not None

    def start(self, directory: Path, content: Content, complete: Callable[[Mapping[str, FileDigest]], None]) -> None:
        """Collective. `directory` exists on rank 0 and is empty; what it will hold is fixed by the return.

        `complete` is called in the process of rank 0, with the digests of all files, and makes the directory valid;
        an OSError or ValueError that it raises fails the write.
        """
        assert not self.busy, "the last directory is not complete yet"
        started = time.monotonic()
        jobs: list[tuple[Path, SavePlan, MCoreSavePlanner]] = []
        metadata = {}
        for name, state in content.roles.items():
            with megatron_device(self._runtime.device):
                plan, planner, whole = self._plan(state)
            jobs.append((directory / name, plan, planner))
            if whole is not None:
                metadata[name] = whole
        commons, files = to_host((content.commons, dict(content.files) if self._runtime.is_main else {}))
        synchronize(self._runtime.device)
        completion = None
        if self._runtime.is_main:
            completion = _Completion(self._runtime.world_size, metadata, commons, complete)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        arguments = (directory, self._runtime.rank, jobs, files, completion, theirs, os.getpid())
        process = context.Process(target=_write, args=arguments, name="megarlhf-writer")
        process.start()
        theirs.close()
        self._job = _Job(directory, process, ours, started)

    def _plan(self, state: ShardedState) -> tuple[SavePlan, MCoreSavePlanner, Metadata | None]:
        """This rank's part of the plan, and on rank 0 what all ranks write. Collective."""
        by_key: dict[str, list[ShardedBase]] = defaultdict(list)
        for item in own_items(state):
            if isinstance(item.data, Tensor):
                item.data = to_fork(item.data.detach(), self._runtime.device)
            by_key[getattr(item, "unique_key", None) or item.key].append(item)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(dict(by_key)), is_coordinator=self._runtime.is_main)
        local = planner.create_local_plan()
        plans = self.to_first(local)
        metadata = None
        if plans is not None:
            _, metadata = planner.create_global_plan(plans)
        numbered = [local] * (self._runtime.rank + 1)
        mine = FileSystemWriter("unused").prepare_global_plan(numbered)[self._runtime.rank]
        return planner.finish_plan(mine), planner, metadata

    def poll(self, *, wait: bool = False) -> WriteOutcome | None:
        """Outcome of the write, the same on every rank; None while it goes on. Collective."""
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
        answers: list[Any] | None = [None] * self._runtime.world_size if self._runtime.is_main else None
        dist.gather_object(job.answer, answers, dst=0)
        outcome: list[WriteOutcome | None] = [None]
        if answers is not None:
            errors: dict[str, list[int]] = defaultdict(list)
            for rank, answer in enumerate(answers):
                if answer is not None and answer[0]:
                    errors[answer[0]].append(rank)
            reasons = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in errors.items()]
            if reasons:
                shutil.rmtree(job.directory, ignore_errors=True)
            size = answers[0][1] if answers[0] else 0
            outcome = [WriteOutcome("; ".join(reasons) or None, time.monotonic() - job.started, size)]
        dist.broadcast_object_list(outcome, src=0)
        return outcome[0]

    def _receive(self, job: _Job, *, wait: bool) -> bool:
        """Take this rank's answer if it is there; tell whether it is."""
        left = max(0.0, job.started + WRITE_SECONDS - time.monotonic())
        if job.answer is None and job.connection.poll(left if wait and self._runtime.world_size == 1 else 0.2 * wait):
            try:
                job.answer = job.connection.recv()
            except EOFError:
                job.process.join()
                job.answer = (f"the writing process died with status {job.process.exitcode}", 0)
        if job.answer is None and time.monotonic() - job.started >= WRITE_SECONDS:
            job.answer = (f"nothing was heard of the writing process for {WRITE_SECONDS:.0f} s", 0)
        return job.answer is not None

    def abandon(self) -> None:
        """End what is in work; the directory stays incomplete. Not collective."""
        if self._job is not None:
            _end(self._job)
            self._job = None


def own_items(state: ShardedState) -> list[ShardedBase]:
    """Items that this rank writes."""
    return [item for item in state.values() if is_main_replica(item.replica_id)]


def to_fork(data: Tensor, device: torch.device) -> Tensor:
    """Host memory that a process forked now can read, whatever happens to `data` later. `device`: the run's."""
    if data.device.type != "cpu":
        return data.to("cpu", non_blocking=True)
    # Of a run on a GPU it may be pinned memory, which the driver shares with the process instead of copying pages.
    return data if device.type == "cpu" else data.clone()


def to_host(tree: Any) -> Any:
    """Copy all tensors of a tree to the host's memory: a forked process cannot read a GPU's."""
    return tree_map(lambda leaf: leaf.to("cpu", non_blocking=True) if isinstance(leaf, Tensor) else leaf, tree)


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


def _write(
    directory: Path,
    rank: int,
    jobs: list[Any],
    files: Mapping[str, Any],
    completion: _Completion | None,
    answer: Any,
    parent: int,
) -> None:
    """Main function of the writing process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing goes on writing when the rank has died
        if os.getppid() != parent:
            os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are for the rank, which decides what becomes of this
    gc.disable()  # tensors of the rank's device are not ours to free
    # OpenMP's threads do not survive a fork. vLLM's worker puts a function that does nothing in the place of
    # torch.set_num_threads (v1/worker/cpu_worker.py), so that it is called by its other name.
    torch._C.set_num_threads(1)
    with contextlib.suppress(OSError):
        os.nice(5)
    status = 0
    try:
        _leave_note(directory, rank, _write_files(directory, jobs, files))
        answer.send((None, _complete(directory, completion) if completion is not None else 0))
    except Exception as error:  # noqa: BLE001 -- the rank reports it
        status = 1
        with contextlib.suppress(Exception):
            answer.send((_in_words(error, directory), 0))
    answer.close()
    os._exit(status)  # nothing that the rank has registered for its end is to run here


def _in_words(error: Exception, directory: Path) -> str:
    """Describe an error. torch's writer does not say that a disk is full."""
    text = f"{type(error).__name__}: {error}"
    free = shutil.disk_usage(directory.parent).free
    return text if free > FULL else f"the disk is full ({free:,} bytes are free at {directory.parent}); {text}"


def _write_files(directory: Path, jobs: list[Any], files: Mapping[str, Any]) -> _Note:
    results: dict[str, list[WriteResult]] = {}
    written: list[Path] = []
    for folder, plan, planner in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        results[folder.name] = []
        if plan.items:
            results[folder.name] = _storage(folder).write_data(plan, planner).value()
            written.append(folder / f"{plan.storage_data.prefix}0.distcp")
    for name, value in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            path.write_text(value, encoding="utf-8")
        elif isinstance(value, bytes):
            path.write_bytes(value)
        else:
            torch.save(value, path)
        sync(path)
        written.append(path)
    return _Note(results, {str(path.relative_to(directory)): digest_of(path) for path in written})


def _storage(folder: Path) -> FileSystemWriter:
    """Make torch's writer without copying ahead. That takes a stream of the GPU, which a forked process cannot have,
    and everything is in the host's memory already."""
    return FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)


def _leave_note(directory: Path, rank: int, note: _Note) -> None:
    notes = directory / NOTES
    notes.mkdir(exist_ok=True)
    atomic_write(notes / str(rank), pickle.dumps(note), synced=False)


def _complete(directory: Path, completion: _Completion) -> int:
    """Wait for all ranks and make the directory a point; returns its bytes. Called in the process of rank 0."""
    notes, deadline = directory / NOTES, time.monotonic() + WRITE_SECONDS
    while missing := [rank for rank in range(completion.ranks) if not (notes / str(rank)).exists()]:
        if time.monotonic() > deadline:
            raise OSError(f"nothing was heard of ranks {missing[:5]} for {WRITE_SECONDS:.0f} s")
        os.listdir(notes)  # a network file system asks its server again
        time.sleep(POLL_SECONDS)
    ranks: list[_Note] = [pickle.loads((notes / str(rank)).read_bytes()) for rank in range(completion.ranks)]
    shutil.rmtree(notes)
    files: dict[str, FileDigest] = {}
    for note in ranks:
        files |= note.files
    for name, metadata in completion.metadata.items():
        results = [note.results[name] for note in ranks]
        files |= _finish(directory, name, metadata, results, completion.commons[name])
    completion.complete(files)
    return sum(file.bytes for file in files.values())
