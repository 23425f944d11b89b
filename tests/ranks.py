"""Rank processes that stay alive between tests: forked from a server that has imported what they need."""

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from megarlhf.runtime import RankInfo, free_port

JOB_SECONDS = 200
GRACE_SECONDS = 20
"""For the other ranks after a failure: the failed one has left its process group, which ends their collectives."""
PR_SET_PDEATHSIG = 1

Job = str | Callable[..., Any]


class RankPool:
    """Runs a function on the first n of its processes, as ranks of one run; starts them when they are first asked for.

    A rank is the leader of a session of its own, and `close` ends the whole session: with the rank its children.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[tuple[Any, Connection]] = []
        self.cpu_seconds = 0.0
        """Of all jobs so far, on all ranks."""

    def run(self, world_size: int, job: Job, *args: Any) -> list[Any]:
        """`job(runtime, *args)` on each rank; the results by rank.

        `job` stands at the top of a module, or is the name of a function in `tests.distributed.jobs`.

        Raises: AssertionError with the traceback of the rank that failed first. The ranks go on with the next job
        where all have answered: they are well, the job was not. One that has not answered hangs, and all are ended.
        """
        assert world_size <= self._size, f"{world_size} ranks of a pool of {self._size}"
        while len(self._workers) < world_size:
            self._workers.append(_start())
        name = job if isinstance(job, str) else job.__name__
        results: list[Any] = [None] * world_size
        try:
            port = free_port()
            for rank in range(world_size):
                self._workers[rank][1].send((job, rank, world_size, port, args))
            failure = self._receive(name, results)
        except BaseException:  # also a test that is interrupted: answers to come belong to no other job
            self.close()
            raise
        if failure is not None:
            raise AssertionError(failure)
        return results

    def _receive(self, name: str, results: list[Any]) -> str | None:
        """Fills in the results; returns what the first failure says."""
        world_size = len(results)
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        failure, failed_at, deadline = None, float("inf"), time.monotonic() + JOB_SECONDS
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failure is None:
                raise TimeoutError(f"{name}: ranks {sorted(pending.values())} did not answer in {JOB_SECONDS} s")
            if not ready:
                raise AssertionError(f"{failure}\nranks {sorted(pending.values())} did not answer after that")
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    succeeded, results[rank], seconds, ended = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"{name}: rank {rank} of {world_size} died") from None
                self.cpu_seconds += seconds
                if not succeeded and ended < failed_at:  # two may be read at once
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failure, failed_at = f"{name} failed on rank {rank} of {world_size}:\n{results[rank]}", ended
        return failure

    def close(self) -> None:
        """Ends the ranks and all that they have started; the next job starts new ones."""
        for process, connection in self._workers:
            connection.close()
            with contextlib.suppress(ProcessLookupError):  # it ended, or has no session yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self._workers = []


def _start() -> tuple[Any, Connection]:
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    # No daemon: those may not have children, as Megatron's writers of checkpoints are.
    process = context.Process(target=_serve, args=(theirs,), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _serve(connection: Connection) -> None:
    """The life of a rank process: it does what it is sent until the pool is closed, or pytest has died."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from megarlhf.commands import launch
    from megarlhf.runtime import shutdown

    launch.silence_libraries()
    gc.freeze()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        before = _cpu_seconds()
        succeeded, value = _do(*message)
        connection.send((succeeded, value, _cpu_seconds() - before, time.monotonic()))
        if not succeeded:  # after it is told: the others' collectives break as this rank leaves its process groups
            shutdown()
        _release_models()


def _release_models() -> None:
    """Free the models of the last job, and with them its process groups: their threads wake a hundred times a second.

    Two holders stay otherwise. A shard that Megatron-Core's optimizer takes from an fp32 parameter holds the
    parameter's autograd node, whose hook holds the model: a cycle through C++ that Python's collector does not see.
    And its rotary embeddings are keys of a cache of the class.
    """
    data_parallel = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    rotary = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    if data_parallel is not None and rotary is not None:
        for model in [found for found in gc.get_objects() if type(found) is data_parallel.DistributedDataParallel]:
            vars(model).clear()
        rotary.RotaryEmbedding.forward.cache_clear()
    gc.collect()
    gc.freeze()  # what is left was imported by the job, and need not be looked through after the next


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _do(job: Job, rank: int, world_size: int, port: int, args: tuple[Any, ...]) -> tuple[bool, Any]:
    from megarlhf import runtime

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    info = RankInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    try:
        if isinstance(job, str):
            from tests.distributed import jobs

            job = getattr(jobs, job)
        joined = runtime.initialize(info, seed=0, timeout_seconds=JOB_SECONDS)
        result = job(joined, *args)  # type: ignore[operator]
        runtime.shutdown()
    except BaseException:  # noqa: BLE001 -- the parent reports it
        return False, traceback.format_exc()
    return True, result
