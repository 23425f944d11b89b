"""Detection of stragglers: ranks that are persistently slower than the others.

Ranks work in lockstep. Each waits in the next collective for the slowest, so a phase takes all of them equally long.
Therefore only the work between collectives is compared:

- a rank's *own seconds* of a phase (`Phases.local`), by the host's clock: its share of the rule rewards, sampling by
  its own engine before responses are gathered, computing advantages
- a *probe*, every few steps: the time of a matrix product of a fixed size on the rank's device

These show a reward function that is slow on one host, and an engine or a device that is throttled or shared. They do
not show a slow network, a slow memory copy, or a device that is slow only in the middle of training: for those the
forward and backward would have to be timed on the device between its collectives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megarlhf.config.watchdog import PHASES, StragglersConfig
from megarlhf.errors import WatchdogTimeout
from megarlhf.runtime import Runtime, synchronize

log = logging.getLogger(__name__)

PROBE = "probe"
WORK = (*PHASES, PROBE)
"""Kinds of work whose seconds are compared, in the order in which they are gathered. Roles are added up."""


class Stragglers:
    """Counts slow steps by rank and work. Counts begin anew after a restart, when ranks may be on other machines."""

    def __init__(self, cfg: StragglersConfig, hosts: Sequence[str]) -> None:
        self._cfg, self._hosts = cfg, hosts
        self._slow: dict[tuple[str, int], int] = {}
        """Consecutive slow steps, by work and rank."""
        self._named: dict[tuple[str, int], int] = {}
        """The step of the last warning, by work and rank."""

    def watch(self, step: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
        """Count a step and return warnings. `seconds` are every rank's own seconds, by work.

        Work that no rank has done in this step leaves its counts unchanged.
        """
        warnings = []
        for work, by_rank in seconds.items():
            if not any(by_rank) or len(by_rank) == 1:
                continue
            floor = 0.0 if work == PROBE else self._cfg.min_excess
            for rank, (own, middle) in enumerate(zip(by_rank, medians_of_others(by_rank), strict=True)):
                slow = own > self._cfg.factor * middle and own - middle >= floor
                key = (work, rank)
                self._slow[key] = self._slow.get(key, 0) + 1 if slow else 0
                is_due = step - self._named.get(key, -self._cfg.repeat_after) >= self._cfg.repeat_after
                if self._slow[key] >= self._cfg.steps and is_due:
                    self._named[key] = step
                    part = "a matrix product (the probe)" if work == PROBE else f"its own part of phase {work!r}"
                    warnings.append(
                        f"rank {rank} on {self._hosts[rank]} is slow, {self._slow[key]} times in a row: {part} took "
                        f"{own:.3g} s, and the median of the {len(by_rank) - 1} others is {middle:.3g} s "
                        f"(watchdog.stragglers.factor = {self._cfg.factor:g})"
                    )
        return warnings

    def probe_due(self, step: int) -> bool:
        return self._cfg.probe_every > 0 and step % self._cfg.probe_every == 0


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of two or more values, the median of all others."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    ordered = [values[n] for n in order]
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # the middle of the others
    medians = [0.0] * len(values)
    for position, n in enumerate(order):
        medians[n] = (ordered[low + (low >= position)] + ordered[high + (high >= position)]) / 2
    return medians


class HasLate(Protocol):
    """The watchdog, as far as it is read at the end of a step."""

    late: bool


class StepExchange:
    """The ranks' exchange at the end of a step, in one small collective: own seconds, and whether a phase is late."""

    def __init__(self, stragglers: Stragglers, runtime: Runtime, watchdog: HasLate) -> None:
        self._stragglers, self._runtime, self._watchdog = stragglers, runtime, watchdog

    def end_step(self, step: int, local_seconds: Mapping[str, float]) -> WatchdogTimeout | None:
        """Exchange, and name stragglers in the log of rank 0. Collective.

        Returns: a WatchdogTimeout, on all ranks, if a phase of any rank has passed its limit and ended by itself.
        """
        own = dict.fromkeys(WORK, 0.0)
        for name, seconds in local_seconds.items():
            own[name.partition("/")[0]] += seconds
        if self._stragglers.probe_due(step):
            own[PROBE] = probe_seconds(self._runtime.device)
        row = torch.tensor([*own.values(), float(self._watchdog.late)], dtype=torch.float64)
        table_RW = torch.zeros(self._runtime.world_size, len(row), dtype=torch.float64, device=self._runtime.device)
        table_RW[self._runtime.rank] = row.to(table_RW.device)
        if self._runtime.world_size > 1:
            dist.all_reduce(table_RW)
        *columns, late = table_RW.T.tolist()
        for warning in self._stragglers.watch(step, dict(zip(WORK, columns, strict=True))):
            if self._runtime.is_main:
                log.warning("%s", warning)
        if not any(late):
            return None
        ranks = ", ".join(str(rank) for rank, flag in enumerate(late) if flag)
        return WatchdogTimeout(
            f"a phase passed its limit on rank {ranks} and then ended; the watchdog's report names it. Raise "
            "watchdog.PHASE if it was working all the time",
            agreed=True,
        )


def probe_seconds(device: torch.device, repeat: int = 4) -> float:
    """Seconds of `repeat` products of two square matrices, the best of three tries. Draws no random number.

    The three tries take 3 ms on an H100 and 10 ms on a CPU core.
    """
    size, dtype = (256, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a_MM = torch.full((size, size), 1.0 / size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeat):
            a_MM = a_MM @ a_MM
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
