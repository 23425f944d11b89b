"""Measurement of messages between the ranks of one run: collectives by operation, group and bytes, and sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist

from megarlhf.rehearsal.calibrate.work import Progress, Sizes
from megarlhf.rehearsal.cost_model.hardware import CollectiveTime
from megarlhf.rehearsal.timeline.trace import Operation
from megarlhf.runtime import Runtime, synchronize

MeasuredOperation = Operation | Literal["send"]
OPERATIONS: tuple[MeasuredOperation, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
)
CALLS = 4
"""Calls in one sample, which is their mean."""
LARGE = 4 << 20
"""Bytes from which a sample is a single call."""


@dataclass(frozen=True)
class Group:
    """Ranks that exchange messages."""

    ranks: tuple[int, ...]
    nodes: int
    handle: Any


def groups_of(world_size: int, ranks_per_node: int) -> dict[tuple[int, ...], int]:
    """Groups to measure, with their number of nodes.

    They are 2, 4, 8, ... and all ranks of the first node; one rank each of 2, 4, ... and all nodes; and the whole
    world. Nodes have equally many ranks, numbered one node after the other.
    """
    chosen = {tuple(range(size)): 1 for size in _sizes(ranks_per_node)}
    nodes = world_size // ranks_per_node
    for size in _sizes(nodes):
        chosen[tuple(range(0, size * ranks_per_node, ranks_per_node))] = size
    if world_size > 1:
        chosen.setdefault(tuple(range(world_size)), nodes)
    return chosen


def make_groups(runtime: Runtime) -> list[Group]:
    """The process groups of `groups_of`. Collective."""
    chosen = groups_of(runtime.world_size, runtime.ranks_per_block)
    return [Group(ranks, nodes, dist.new_group(list(ranks))) for ranks, nodes in chosen.items()]


def num_collectives(groups: Sequence[Group]) -> int:
    """Number of calls of `progress` in `measure_collectives`."""
    return sum(len(OPERATIONS) + (len(group.ranks) == 2) for group in groups)


def _sizes(most: int) -> list[int]:
    """2, 4, 8, ... and `most`."""
    powers = [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]
    return sorted({*powers, *([most] if most > 1 else [])})


def measure_collectives(
    runtime: Runtime, groups: Sequence[Group], sizes: Sizes, progress: Progress
) -> list[CollectiveTime]:
    """Time of each collective on the slowest rank of each group, the same rows on every rank. Collective."""
    rows: list[CollectiveTime] = []
    for group in groups:
        operation: MeasuredOperation
        for operation in (*OPERATIONS, "send"):
            if operation == "send" and len(group.ranks) != 2:
                continue
            progress(f"{operation}, {len(group.ranks)} ranks on {group.nodes} node(s)")
            for nbytes in sizes.message_bytes:
                seconds = _seconds(runtime, group, operation, nbytes, sizes)
                if seconds is not None:
                    rows.append(CollectiveTime(operation, len(group.ranks), group.nodes, "device", nbytes, seconds))
    return rows


def _seconds(runtime: Runtime, group: Group, operation: MeasuredOperation, nbytes: int, sizes: Sizes) -> float | None:
    """The least of several samples; None on all ranks where a rank would have less than one number."""
    count = nbytes // 4 // len(group.ranks) * len(group.ranks)
    if not count and operation not in ("all_reduce", "broadcast", "send"):
        return None
    mine: float | None = None
    if runtime.rank in group.ranks:
        call = _call(runtime, group, operation, count if count else max(1, nbytes // 4))
        samples, calls = [], 1 if nbytes >= LARGE else CALLS
        for _ in range(sizes.samples + 1):
            dist.barrier(group.handle)
            synchronize(runtime.device)
            began = perf_counter()
            for _ in range(calls):
                call()
            synchronize(runtime.device)
            samples.append((perf_counter() - began) / calls)
        mine = max(1e-9, min(samples[1:]))
    times: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(times, mine)
    return max(seconds for seconds in times if seconds is not None)


def _call(runtime: Runtime, group: Group, operation: MeasuredOperation, numel: int) -> Callable[[], object]:
    """One call of the operation on fp32 numbers; `numel` as in `trace.Collective`."""
    whole = torch.zeros(numel, device=runtime.device)
    part = torch.zeros(max(1, numel // len(group.ranks)), device=runtime.device)
    handle, first, last = group.handle, group.ranks[0], group.ranks[-1]
    if operation == "send":
        if runtime.rank == first:
            return lambda: dist.send(whole, last, group=handle)
        return lambda: dist.recv(whole, first, group=handle)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=handle),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=handle),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=handle),
        "broadcast": lambda: dist.broadcast(whole, first, group=handle),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=handle),
    }
    return calls[operation]


def median_over_ranks(rows: Sequence[Any]) -> list[Any]:
    """Rows of the same measurements on all ranks, each with the median of the ranks' times. Collective."""
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, [row.seconds for row in rows])
    return [
        row._replace(seconds=median(of_ranks)) for row, of_ranks in zip(rows, zip(*times, strict=True), strict=True)
    ]
