"""Metrics of a step's cost. They differ between two runs whose numbers are equal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from megarlhf.runtime import Runtime, peak_memory_bytes

Value = TypeVar("Value")

MEASURED = (
    "seconds",
    "tokens_per_second",
    "rollout_tokens_per_second",
    "rollout_idle_fraction",
    "peak_memory_gib",
    "wall_clock",
    "engine_rebuilds",
    "columns_received_mib",
)
"""Beginnings of names of such metrics: seconds, rates, memory, bytes received, time of day, and engines that were built
again."""


def reproducible(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics without those of cost. On a CPU they are equal bit for bit in every run of one configuration and layout,
    also after a resume."""
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def measure(runtime: Runtime) -> dict[str, float]:
    """Measure `peak_memory_gib`, of the rank that has needed most so far, and `wall_clock`, seconds since 1970.

    Collective: one number.
    """
    peak = torch.tensor(float(peak_memory_bytes(runtime)), dtype=torch.float64, device=runtime.device)
    if runtime.world_size > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"peak_memory_gib": float(peak) / 2**30, "wall_clock": time.time()}
