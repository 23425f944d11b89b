"""What a rehearsal finds: plain data, written as `rehearsal.json` and drawn by `page.py`.

Bytes and seconds throughout. Times are estimates by the hardware file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarlhf.rehearsal.fake_device.ledger import LargeStorage

FORMAT = 1
"""Of `rehearsal.json`."""


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """Memory of one rank in one phase of one step."""

    step: int
    """0: before the first step."""
    phase: str
    start: int
    peak: int
    end: int
    by_kind: dict[str, int]
    """At the peak."""
    largest: list[LargeStorage]
    host_peak: int


@dataclass(frozen=True, kw_only=True)
class MarginRow:
    """What cannot be seen."""

    name: str
    nbytes: int
    scaling: str
    source: str


@dataclass(frozen=True, kw_only=True)
class MessageRow:
    """Collectives and messages of one rank."""

    step: int
    phase: str
    operation: str
    group: str
    size: int
    between_nodes: bool
    host: bool
    count: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class AssumptionRow:
    """A number that was answered."""

    where: str
    what: str
    answer: str
    reason: str
    count: int


@dataclass(frozen=True, kw_only=True)
class ResumePointRow:
    """What a rank writes of a resume point, and its memory meanwhile."""

    nbytes: int
    files: int
    """With tensors; a role of which it has nothing to write has none."""
    peak: int
    """Of the device, in the phase in which training stands still."""
    host_bytes: int
    """Of the copy that is written from while training goes on."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rehearsed rank."""

    rank: int
    stages: dict[str, int | None]
    """Pipeline stage by role."""
    stands_for: int
    why: str
    memory: list[PhaseRow]
    peak: int
    """Of tensors, over all steps."""
    peak_at: tuple[int, str]
    """Step and phase."""
    margin: list[MarginRow]
    need: int
    """`peak` and margin together."""
    curve: list[tuple[float, dict[str, int]]]
    """(seconds, bytes by kind) over the whole rehearsal."""
    phases_at: list[tuple[float, int, str]]
    """(seconds, step, phase) where each begins on the curve."""
    messages: list[MessageRow]
    groups_created: int
    memberships: int
    host_peak: int
    resume_point: ResumePointRow | None
    """None: none was written."""
    offloaded: int
    """Host memory for what is not on the device meanwhile."""
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase of one step, of the ranks that were replayed together."""

    phase: str
    seconds: float
    """Of the rank that spends the most in it."""
    busy: float
    """Mean seconds of computing."""
    idle: float
    """Mean seconds of waiting for ranks that are late: bubble and uneven work."""
    communication: float
    """Mean seconds of exposed communication."""
    again: float
    """Mean seconds of computing again what was not kept for the backward, of `busy`."""
    offload: float
    """Mean seconds of copies between device and host memory, of `busy`."""
    flops: float
    """Mean of products and attention, without layers that are computed again. Logits that the log-prob kernel makes
    again in its backward are in it."""
    utilisation: float | None
    """Model FLOPs utilisation; None where nothing is multiplied."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step."""

    step: int
    seconds: float
    phases: list[PhaseTime]
    utilisation: float
    """Model FLOPs utilisation of the whole step, rollout apart."""
    bubble: float
    """Share of the training phases in which ranks wait for others."""
    recomputation: float
    """Share of the training phases in which they compute again."""
    exposed: float
    """Share of the training phases in which they wait for messages under way."""
    forward_and_backward: float
    """Share of the training phases that is left: what each rank would compute at any layout. With the three above it
    is at most 1: a rank that is through early is in none of them."""
    communication: float
    """Seconds of exposed communication, mean over ranks."""
    tokens_per_second: float
    """Trained, of the whole job."""


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """The engines in one step."""

    slowest: float
    fastest: float
    tokens: int
    most_running: int


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """From trainer to engines once, by the plan for every rank."""

    received_min: int
    received_mean: float
    received_max: int
    sent_max: int
    between_nodes: int
    """Into all nodes together."""


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """Host memory of one rank, or of what it starts."""

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """A rehearsal."""

    command: str
    world_size: int
    ranks_per_node: int
    steps: int
    layouts: dict[str, str]
    """By role, in words."""
    capacity: int
    """Bytes of a device."""
    fits: bool
    tightest: int
    """Rank."""
    refusals: list[str]
    """Why the run would not start."""
    ranks: list[RankResult]
    host: list[HostRow]
    """Of one rank, the one that needs most."""
    host_per_node: int
    times: list[StepTime]
    rollouts: list[RolloutRow]
    reshard: Reshard | None
    faults: list[str]
    """Where ranks do not fit together, in sentences."""
    assumptions: list[AssumptionRow]
    notes: list[str]
    """What stood in for what, and how it was counted, in sentences."""
    hardware: str
    hardware_sources: dict[str, str]
    config: dict[str, Any]
    tool_seconds: float
    tool_gib: float
    """Largest resident memory of all processes of the rehearsal together."""

    @property
    def tightest_rank(self) -> RankResult:
        return next(each for each in self.ranks if each.rank == self.tightest)

    @property
    def runs(self) -> bool:
        """It fits, and its ranks fit together."""
        return self.fits and not self.faults

    @property
    def free(self) -> int:
        """Bytes that are left on the tightest rank; negative where it does not fit."""
        return self.capacity - self.tightest_rank.need

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **_plain(self), "free": self.free}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
