"""Rank processes that stay alive between tests, so that torch and Megatron are imported once."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from megarlhf.runtime import RankInfo, free_port

JOB_SECONDS = 200


class RankPool:
    """Runs a function of `tests.distributed.jobs` on the first n of its processes, as ranks of one run."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, job: str, *args: Any) -> list[Any]:
        """`job(runtime, *args)` on each rank; the results by rank. A failure on any rank fails the test."""
        if not self._workers:
            self._start()
        port = free_port()
        for rank in range(world_size):
            self._workers[rank][1].send((job, rank, world_size, port, args))
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        results: list[Any] = [None] * world_size
        deadline = time.monotonic() + JOB_SECONDS
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"{job}: ranks {sorted(pending.values())} did not answer in {JOB_SECONDS} s")
            for connection in ready:
                rank = pending.pop(connection)
                succeeded, value = connection.recv()
                if not succeeded:
                    self.close()  # the others may wait in a collective for ever
                    raise AssertionError(f"{job} failed on rank {rank} of {world_size}:\n{value}")
                results[rank] = value
        return results

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _worker(connection: Connection) -> None:
    from tests.distributed import jobs

    serve(connection, lambda name: getattr(jobs, name))


def serve(connection: Connection, find: Callable[[str], Callable[..., Any]]) -> None:
    """The life of a rank process: runs what it is sent, `find` knowing a job by its name, until the test is over."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from megarlhf import runtime
    from megarlhf.commands import launch

    launch.quieten()
    while True:
        try:
            job, rank, world_size, port, args = connection.recv()
        except EOFError:
            return
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        info = RankInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        try:
            joined = runtime.initialize(info, seed=0, timeout_seconds=JOB_SECONDS)
            result = find(job)(joined, *args)
            runtime.shutdown()
        except BaseException:  # noqa: BLE001 -- the parent reports it
            connection.send((False, traceback.format_exc()))
        else:
            connection.send((True, result))
