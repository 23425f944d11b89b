"""Processes for ranks, forked from a server that has imported torch and Megatron-Core."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from megarlhf.runtime import RankInfo, free_port

PRELOAD = [
    "megarlhf.trainers.supervised.sft",
    "megarlhf.trainers.supervised.rm",
    "megarlhf.trainers.rl.loop",
    "benchmarks.rehearsal.real_run",
]


def together(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`function(*arguments)` in a process for each, at the same time. Raises: RuntimeError with the first failure."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = []
    for given in arguments:
        ours, theirs = context.Pipe()
        process = context.Process(target=_call, args=(theirs, function, given))
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        answers = [connection.recv() for _, connection in started]
    finally:
        for process, _ in started:
            process.join(timeout=5)
            process.kill()
    for succeeded, answer in answers:
        if not succeeded:
            raise RuntimeError(answer)
    return [answer for _, answer in answers]


def _call(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        connection.send((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 -- the parent reports it
        connection.send((False, traceback.format_exc()))


def as_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(runtime, *arguments)` on gloo ranks."""
    port = free_port()
    return together(_rank, [(rank, world_size, port, function, arguments) for rank in range(world_size)])


def _rank(rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from megarlhf import runtime

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    info = RankInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    joined = runtime.initialize(info, seed=0, timeout_seconds=200)
    answer = function(joined, *arguments)
    runtime.shutdown()
    return answer
