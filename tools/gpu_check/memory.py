"""Memory by step and phase: measured on a real run, and beside what a rehearsal said."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from megarlhf import runtime
from megarlhf.rehearsal.fakes.phases import BETWEEN, Steps

LEFT_OUT = (BETWEEN, "build", "checkpoint")
"""Phases that are not compared. A rehearsal draws no weights and exports nothing; what lies between phases is small."""


@dataclass(frozen=True)
class PhasePeak:
    """The most that one rank held in a phase of a step, over all stays in it."""

    step: int
    phase: str
    nbytes: int


class MemoryMeter(Protocol):
    """Of one rank's device."""

    def peak(self) -> int:
        """The most bytes that were held since the last reset."""
        ...

    def reset(self) -> None: ...


class AllocatorMeter:
    """Of a GPU: what torch's allocator has handed out, without what its libraries keep for themselves.

    cuBLAS has a workspace for each of its handles, which comes from the same allocator and stays: it is there before
    anything is measured, and subtracted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            (square @ square).sum().backward()  # the gradient is computed by another thread, which has its own handle
            del square
        runtime.synchronize(device)
        self.kept = runtime.allocated_bytes(device)
        """Bytes of those workspaces."""
        self.reset()

    def peak(self) -> int:
        return runtime.peak_allocated_bytes(self._device) - self.kept

    def reset(self) -> None:
        runtime.reset_peak_allocated(self._device)


class MeasuredPhases:
    """Reads the meter whenever the phase changes. `steps.phases` takes the place of a run's phases."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._now = (0, "build")
        self._peaks: dict[tuple[int, str], int] = {}
        self.steps = Steps(2**62, self.moved, lambda step: None)
        meter.reset()

    def moved(self, step: int, phase: str) -> None:
        """What was held up to here belongs to the phase before."""
        self._peaks[self._now] = max(self._peaks.get(self._now, 0), self._meter.peak())
        self._now = (step, phase)
        self._meter.reset()

    def peaks(self) -> list[PhasePeak]:
        """So far."""
        return [PhasePeak(step, phase, nbytes) for (step, phase), nbytes in self._peaks.items()]


# --- beside a rehearsal ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One phase of one step, of the rank where the two are furthest apart."""

    step: int
    phase: str
    rank: int
    measured: int
    rehearsed: int

    @property
    def error(self) -> float:
        """|measured - rehearsed| / measured."""
        return abs(self.measured - self.rehearsed) / max(self.measured, 1)


def merged(peaks: Iterable[PhasePeak]) -> dict[tuple[int, str], int]:
    """A phase that was entered several times is one."""
    largest: dict[tuple[int, str], int] = {}
    for peak in peaks:
        if peak.phase not in LEFT_OUT:
            key = peak.step, peak.phase
            largest[key] = max(largest.get(key, 0), peak.nbytes)
    return largest


def compare(
    measured: Mapping[int, Sequence[PhasePeak]], rehearsed: Mapping[int, Sequence[PhasePeak]]
) -> tuple[list[Compared], list[str]]:
    """Every step and phase that both have seen, by the worst of the ranks; and in sentences what only one has.

    `measured`, `rehearsed`: by rank. Ranks that were not rehearsed are not compared, and named.
    """
    worst: dict[tuple[int, str], Compared] = {}
    missing: set[str] = set()
    for rank in sorted(measured.keys() | rehearsed.keys()):
        if rank not in measured or rank not in rehearsed:
            missing.add(f"rank {rank} was not {'measured' if rank in rehearsed else 'rehearsed'}")
            continue
        ours, theirs = merged(measured[rank]), merged(rehearsed[rank])
        for step, phase in sorted(ours.keys() ^ theirs.keys()):
            which = "measured" if (step, phase) in ours else "rehearsed"
            missing.add(f"{phase} of step {step} was {which} only")
        for key in ours.keys() & theirs.keys():
            pair = Compared(*key, rank, ours[key], theirs[key])
            if key not in worst or pair.error > worst[key].error:
                worst[key] = pair
    return [worst[key] for key in sorted(worst)], sorted(missing)


def dump(path: Path, peaks: Sequence[PhasePeak]) -> None:
    path.write_text(json.dumps([asdict(peak) for peak in peaks]) + "\n")


def load(path: Path) -> list[PhasePeak]:
    return [PhasePeak(**entry) for entry in json.loads(path.read_text())]
