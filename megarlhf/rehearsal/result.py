"""Results of a rehearsal: plain data, written as `rehearsal.json` and drawn by `report/page.py`.

Bytes and seconds throughout. Times are estimates by the hardware file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

from megarlhf.rehearsal.fake_device.ledger import LargeStorage

FORMAT = 1
"""Version of `rehearsal.json`."""


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """Memory of one rank in one phase of one step."""

    step: int
    """0 is before the first step."""
    phase: str
    start: int
    peak: int
    end: int
    by_kind: dict[str, int]
    """Bytes by kind of memory, at the peak."""
    largest: list[LargeStorage]
    host_peak: int


@dataclass(frozen=True, kw_only=True)
class MarginRow:
    """Device memory that a rehearsal cannot see."""

    name: str
    nbytes: int
    scaling: str
    source: str


@dataclass(frozen=True, kw_only=True)
class MessageRow:
    """Equal collectives or messages of one rank."""

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
    """A number that the program read and that was assumed."""

    where: str
    what: str
    answer: str
    reason: str
    count: int


@dataclass(frozen=True, kw_only=True)
class ResumePointRow:
    """One rank's part of a resume point, and its memory while the point is written."""

    nbytes: int
    files: int
    """Files with tensors. A role without anything to write has none."""
    tables: int
    """Responses that are being drawn in slices, and a step's state: rank 0 writes them, and every rank holds them in
    host memory."""
    peak: int
    """Device memory in the phase in which training waits."""
    host_bytes: int
    """Copy in host memory, from which the point is written while training continues."""


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
    """Bytes of tensors in the phase that needs most."""
    peak_at: tuple[int, str]
    """(step, phase) that needs most."""
    margin: list[MarginRow]
    """Margin of that phase."""
    need: int
    """`peak` and margin together."""
    curve: list[tuple[float, dict[str, int]]]
    """(seconds, bytes by kind) over the whole rehearsal."""
    phases_at: list[tuple[float, int, str]]
    """(seconds, step, phase): beginning of each phase on the curve."""
    messages: list[MessageRow]
    groups_created: int
    memberships: int
    host_peak: int
    resume_point: ResumePointRow | None
    """The resume point; None if none was written."""
    offloaded: int
    """Host memory for what is offloaded."""
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase of one step, over the ranks that were replayed together."""

    phase: str
    seconds: float
    """Seconds of the rank that spends the most in it."""
    busy: float
    """Mean seconds of computing."""
    idle: float
    """Mean seconds of waiting for late ranks: bubble and uneven work."""
    communication: float
    """Mean seconds of exposed communication."""
    again: float
    """Mean seconds of recomputation in the backward, part of `busy`."""
    offload: float
    """Mean seconds of copies between device and host memory, part of `busy`."""
    flops: float
    """Mean FLOPs of products and attention, without layers that are recomputed. Logits that the log-prob kernel makes
    again in its backward are included."""
    utilisation: float | None
    """Model FLOPs utilisation; None where nothing is multiplied."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step."""

    step: int
    seconds: float
    phases: list[PhaseTime]
    utilisation: float
    """Model FLOPs utilisation of the whole step without the rollout."""
    bubble: float
    """Share of the training phases in which ranks wait for others."""
    recomputation: float
    """Share of the training phases in which ranks recompute."""
    exposed: float
    """Share of the training phases in which ranks wait for messages under way."""
    forward_and_backward: float
    """The rest of the training phases: what each rank would compute at any layout. With the three above it is at most
    1: a rank that finishes early is in none of them."""
    communication: float
    """Seconds of exposed communication, mean over ranks."""
    tokens_per_second: float
    """Trained tokens of the whole job per second."""


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """Rollout engines of the job in one step."""

    slowest: float
    """Seconds of the slowest engine, for which every rank waits."""
    fastest: float
    tokens: int
    """Sampled tokens."""
    most_running: int
    """Largest number of sequences at once on one engine; 0 where a speed was stated."""
    observed: int = 0
    """Tokens of an environment's answers that engines computed between two turns."""
    computed: int = 0
    """Tokens of prompts that engines computed, with what earlier weights drew of responses in slices."""
    waited: float = 0.0
    """Seconds in which a sequence waits for room in the cache, on the engine where they are most; 0 where a speed was
    stated."""

    def after(self, earlier: RolloutRow) -> RolloutRow:
        """Both rollouts of a step, such as samples and greedy responses: all ranks wait for each."""
        sums = {field.name: getattr(self, field.name) + getattr(earlier, field.name) for field in fields(self)}
        return RolloutRow(**{**sums, "most_running": max(self.most_running, earlier.most_running)})


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """One update of weights from trainer to engines, by the plan for every rank."""

    received_min: int
    received_mean: float
    received_max: int
    sent_max: int
    between_nodes: int
    """Bytes that enter all nodes together."""


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """Host memory of one rank, or of the processes that it starts."""

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a rehearsal."""

    command: str
    world_size: int
    ranks_per_node: int
    steps: int
    layouts: dict[str, str]
    """Layout of each role, as text."""
    capacity: int
    """Bytes of a device; 0 means that no size was given."""
    fits: bool
    tightest: int
    """The rank that needs most."""
    refusals: list[str]
    """Reasons why the run would not start."""
    ranks: list[RankResult]
    host: list[HostRow]
    """Host memory of the rank that needs most of it."""
    host_per_node: int
    times: list[StepTime]
    rollouts: list[RolloutRow]
    reshard: Reshard | None
    faults: list[str]
    """Sentences about ranks that do not fit together."""
    assumptions: list[AssumptionRow]
    notes: list[str]
    """Sentences about stand-ins and about what was counted how."""
    hardware: str
    hardware_sources: dict[str, str]
    config: dict[str, Any]
    tool_seconds: float
    tool_gib: float
    """Largest resident memory of all processes of the rehearsal together."""

    @property
    def tightest_rank(self) -> RankResult:
        return next(rank for rank in self.ranks if rank.rank == self.tightest)

    @property
    def runs(self) -> bool:
        """Whether the job fits, and its ranks fit together."""
        return self.fits and not self.faults

    @property
    def free(self) -> int:
        """Bytes left on the tightest rank; negative where it does not fit."""
        return self.capacity - self.tightest_rank.need

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self), "free": self.free}
