"""Which rank is persistently slower than the others.

Ranks work in lockstep: each waits in the next collective for the slowest, so all take equally long for a phase. What
tells them apart is what a rank does between collectives, and that is what is compared:

- its *own seconds* of a phase: this rank's share of the rule rewards, sampling by its own engine before the responses
  are gathered, computing advantages (`Phases.local`). Measured by the host's clock.
- a *probe*, every so many steps: the time of a matrix product of a fixed size on this rank's device.

What they see: a reward function that is slow on one host, an engine or a device that is throttled or shared. What they
do not see: a slow network, a slow memory copy, and a device that is slow in the middle of training only; for those the
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
"""What seconds are compared of, in the order in which they are gathered. Those of several roles are added."""


class Stragglers:
    """Counts slow steps by rank and work. It begins anew in each process: after a restart ranks stand elsewhere."""

    def __init__(self, cfg: StragglersConfig, hosts: Sequence[str]) -> None:
        self._cfg, self._hosts = cfg, hosts
        self._slow: dict[tuple[str, int], int] = {}
        """Consecutive slow steps, by work and rank."""
        self._named: dict[tuple[str, int], int] = {}
        """The step in which it was named last."""

    def watch(self, step: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
        """Take note of a step: own seconds of every rank, by work. Returns what is to be said. Work that no rank has
        done in this step leaves its counts as they are."""
        said = []
        for work, by_rank in seconds.items():
            if not any(by_rank) or len(by_rank) == 1:
                continue
            floor = 0.0 if work == PROBE else self._cfg.min_excess
            for rank, (own, middle) in enumerate(zip(by_rank, medians_of_others(by_rank), strict=True)):
                slow = own > self._cfg.factor * middle and own - middle >= floor
                key = (work, rank)
                self._slow[key] = self._slow.get(key, 0) + 1 if slow else 0
                due = step - self._named.get(key, -self._cfg.repeat_after) >= self._cfg.repeat_after
                if self._slow[key] >= self._cfg.steps and due:
                    self._named[key] = step
                    what = "a matrix product (the probe)" if work == PROBE else f"its own part of phase {work!r}"
                    said.append(
                        f"rank {rank} on {self._hosts[rank]} is slow: {what} took {own:.3g} s, the median of the "
                        f"{len(by_rank) - 1} others is {middle:.3g} s, and so for {self._slow[key]} times in a row "
                        f"(watchdog.stragglers.factor = {self._cfg.factor:g})"
                    )
        return said

    def probe_due(self, step: int) -> bool:
        return self._cfg.probe_every > 0 and step % self._cfg.probe_every == 0


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of all but itself: of two, the other one."""
    order = sorted(range(len(values)), key=lambda n: values[n])
    ordered = [values[n] for n in order]
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # the middle of those that are left
    medians = [0.0] * len(values)
    for place, n in enumerate(order):
        medians[n] = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
    return medians


class Late(Protocol):
    """The part of the watchdog that is asked at the end of a step."""

    late: bool


class Border:
    """What ranks tell each other at the end of a step, in one small collective: own seconds, and whether a phase has
    passed its limit."""

    def __init__(self, stragglers: Stragglers, runtime: Runtime, watchdog: Late) -> None:
        self._stragglers, self._runtime, self._watchdog = stragglers, runtime, watchdog

    def end_step(self, step: int, local_seconds: Mapping[str, float]) -> WatchdogTimeout | None:
        """Collective. Names stragglers in the log of rank 0.

        Returns: a WatchdogTimeout, on all ranks, when a phase of any has passed its limit and ended by itself.
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
        for sentence in self._stragglers.watch(step, dict(zip(WORK, columns, strict=True))):
            if self._runtime.is_main:
                log.warning("%s", sentence)
        if any(late):
            ranks = ", ".join(str(rank) for rank, flag in enumerate(late) if flag)
            return WatchdogTimeout(
                f"a phase passed its limit on rank {ranks} and came to its end; the watchdog's report says which. "
                "Raise watchdog.PHASE if it was at work all the time",
                agreed=True,
            )
        return None


def probe_seconds(device: torch.device, repeat: int = 4) -> float:
    """Seconds of `repeat` products of two square matrices, the best of three: 3 ms on an H100, 10 ms on a CPU core, all
    three together. Draws no random number."""
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
