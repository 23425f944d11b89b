"""Processes of rehearsed ranks, as many at a time as there are workers.

A rank takes over its process: process group, device and patches. Processes are forked from one that has imported
everything that they need, so that a rank starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import megarlhf
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.job import Job, RankRecord
from megarlhf.trainers.entries import import_entry


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank."""

    rank: int
    step: int
    phase: str
    """`DONE` when the rank has finished."""
    operations: int
    ranks: int = 0
    """Ranks that are rehearsed in all, as far as is known."""


PR_SET_PDEATHSIG = 1
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DONE = "done"
"""Value in place of a phase."""


class RankFailed(RuntimeError):
    """A rehearsed rank ended with an error of the program."""


class RankRefused(ValueError):
    """The program refuses the job. The message is its own."""


OnProgress = Callable[[RankProgress], None]


def run_ranks(
    jobs: Sequence[Job],
    price: Pricing,
    *,
    workers: int,
    on_progress: OnProgress = lambda progress: None,
    ranks: int = 0,
) -> list[RankRecord]:
    """Records of all jobs, in their order.

    ranks: number of ranks that are rehearsed in all, where more jobs follow.
    Raises: RankRefused with the message of a ValueError of the program; RankFailed with the traceback of any other
    error. The other ranks are ended then.
    """
    _import_what_ranks_need(jobs)
    context = multiprocessing.get_context("fork")
    waiting, records = list(enumerate(jobs)), dict[int, RankRecord]()
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                index, job = waiting.pop(0)
                gc.freeze()  # a collection in the rank would write to all objects, and so copy what processes share
                with _signals_deferred():  # else a rank might start that nobody ends
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_rank_process, args=(job, price, theirs), daemon=True)
                    process.start()
                    theirs.close()
                    running[ours] = (index, process)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                index, process = running[connection]
                message = _receive(connection, jobs[index], process)
                if isinstance(message, RankProgress):
                    on_progress(replace(message, ranks=ranks or len(jobs)))
                    continue
                on_progress(RankProgress(message.rank, 0, DONE, sum(message.operations.values()), ranks or len(jobs)))
                records[index] = message
                del running[connection]
                connection.close()
                process.join()
    finally:
        with _signals_deferred():
            for connection, (_, process) in running.items():
                process.kill()
                process.join()
                connection.close()
        gc.unfreeze()
    return [records[index] for index in range(len(jobs))]


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Scope in which a signal that ends the command is deferred until the end of the scope.

    Blocking signals would not be enough: the system would give them to another thread, and Python would still handle
    them in this one.
    """
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for pending in received:
            signal.raise_signal(pending)


def _receive(connection: Connection, job: Job, process: Any) -> RankProgress | RankRecord:
    """The next message of a rank. Raises: see `run_ranks`."""
    try:
        message = connection.recv()
    except (EOFError, OSError):  # at the beginning of a message, in the middle of one
        process.join()
        raise RankFailed(
            f"the process of rank {job.rank} ended without a message (exit status {process.exitcode}); if the "
            "machine was short of memory, rehearse with fewer --workers"
        ) from None
    if isinstance(message, BaseException):
        raise message
    assert isinstance(message, RankProgress | RankRecord)
    return message


def _import_what_ranks_need(jobs: Sequence[Job]) -> None:
    torch.set_num_threads(1)
    for command in {job.command for job in jobs}:
        import_entry(command)
    importlib.import_module("megarlhf.rehearsal.program")
    gc.collect()


def _rank_process(job: Job, price: Pricing, connection: Connection) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever kills the command ends this
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: the command ends its ranks
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cfg: Any = job.cfg
    tempfile.tempdir = str(cfg.run.dir.parent)  # the rehearsal's directory: it also removes what a killed rank leaves
    with _silenced():
        connection.send(_run_rank(job, price, connection))
        connection.close()
    os._exit(0)  # what the process group and the interpreter would do at their end is not worth waiting for


def _run_rank(job: Job, price: Pricing, connection: Connection) -> RankRecord | Exception:
    """The record, or the error for the parent process to raise."""

    def on_phase(step: int, phase: str, operations: int) -> None:
        connection.send(RankProgress(job.rank, step, phase, operations))

    try:
        from megarlhf.rehearsal.program import Rank

        return Rank(job, price, on_phase).run()
    except Exception as error:  # noqa: BLE001 -- handed on
        if isinstance(error, ValueError) and _is_our_refusal(error):
            return RankRefused(f"rank {job.rank}: {error}")
        trace = "".join(traceback.format_exception(error))
        return RankFailed(f"rank {job.rank} of the rehearsal failed:\n{trace}")


def _is_our_refusal(error: BaseException) -> bool:
    """Whether our own code raised the error, so that its message is for users."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(megarlhf.__file__).resolve().parent)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Scope without the program's own output."""
    sys.stdout.flush()
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        yield
