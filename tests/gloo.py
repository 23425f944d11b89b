"""A function on several gloo ranks, for tests that have no pool at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarlhf.runtime import Runtime
from tests.ranks import RankPool


def run_ranks(world_size: int, directory: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on each rank of a fresh gloo world; the results by rank."""
    pool = RankPool(world_size)
    try:
        return pool.run(world_size, _by_rank, function, *args)
    finally:
        pool.close()


def _by_rank(runtime: Runtime, function: Callable[..., Any], *args: Any) -> Any:
    return function(runtime.rank, *args)
