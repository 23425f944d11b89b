"""A function on several gloo ranks. The ranks are forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 60


def run_ranks(world_size: int, directory: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on each rank of a fresh gloo world; the results by rank.

    `function` stands at the top of a module. `directory` is a fresh one, where the ranks meet. A rank that fails
    fails the test, and so does one that has not answered after a minute (it hangs in a collective).
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ranks: dict[Connection, tuple[int, Any]] = {}
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        call = (theirs, rank, world_size, directory / "rendezvous", function, args)
        process = context.Process(target=_rank, args=call, daemon=True)
        process.start()
        theirs.close()
        ranks[ours] = (rank, process)
    results: list[Any] = [None] * world_size
    try:
        pending = dict(ranks)
        while pending:
            ready = wait(list(pending), timeout=SECONDS)
            assert ready, f"ranks {sorted(rank for rank, _ in pending.values())} did not answer in {SECONDS} s"
            for connection in ready:
                rank, _ = pending.pop(connection)  # type: ignore[index]
                failure, results[rank] = connection.recv()  # type: ignore[union-attr]
                assert failure is None, f"rank {rank} of {world_size}:\n{failure}"
    finally:
        for connection, (_, process) in ranks.items():
            connection.close()
            process.kill()
            process.join()
    return results


def _rank(
    connection: Connection, rank: int, world_size: int, rendezvous: Path, function: Callable[..., Any], args: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=SECONDS // 2),
        )
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 -- the parent reports it
        connection.send((traceback.format_exc(), None))
    else:
        connection.send((None, result))
