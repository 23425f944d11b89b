"""Results of a replay: times of steps, phases and ranks, and faults. Seconds throughout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megarlhf.rehearsal.timeline.deadlocks import Fault, ReplayError
from megarlhf.rehearsal.timeline.trace import Operation, Work

Message = Literal["send", "receive"]
CommunicationKey = tuple[Operation | Message, str]


@dataclass(slots=True)
class Communication:
    """One operation of one rank in groups of one label, in one phase of one step: sums, added up by the replay."""

    count: int = 0
    """Number of completed communications that were issued in the phase."""
    nbytes: int = 0
    seconds: float = 0.0
    """Price. The part of it that is not in `transfer` was hidden behind computing or behind an idle wait."""
    idle: float = 0.0
    """Exposed by waits in this phase: another rank had not issued it yet. It is a pipeline's bubble and uneven work."""
    queued: float = 0.0
    """Exposed: all had issued it, but earlier communications of the group were not over."""
    transfer: float = 0.0
    """Exposed: it was under way."""

    def exposed(self) -> float:
        """Advance of the clock by waits."""
        return self.idle + self.queued + self.transfer


@dataclass(slots=True)
class RankTimes:
    """One rank in one phase of one step: sums, added up by the replay."""

    seconds: float = 0.0
    """Advance of the rank's clock by events of the phase: `busy` and `exposed` together."""
    compute: defaultdict[Work, float] = field(default_factory=lambda: defaultdict(float))
    communication: defaultdict[CommunicationKey, Communication] = field(
        default_factory=lambda: defaultdict(Communication)
    )
    """Key: operation and name of the group."""

    def busy(self) -> float:
        """Seconds of computing."""
        return sum(self.compute.values())

    def exposed(self) -> float:
        """Seconds of waiting."""
        return sum(row.exposed() for row in self.communication.values())

    def idle(self) -> float:
        """Seconds of waiting for ranks that were late."""
        return sum(row.idle for row in self.communication.values())


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The replayed ranks in one phase of one step. Ranks without an event in it are left out."""

    ranks: Mapping[int, RankTimes]

    def seconds(self) -> float:
        """Seconds of the rank that spends the most in it."""
        return max(rank.seconds for rank in self.ranks.values())


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times from one `StepMark` to the next."""

    step: int | None
    """Step of the mark at the end; None for the time after a rank's last mark."""
    ranks: Mapping[int, float]
    """Advance of each rank's clock."""
    phases: Mapping[str, PhaseTimes]
    """Phases in the order in which the first rank comes to them."""

    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.ranks.values())


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay. With faults, times are those of the events that were reached."""

    steps: tuple[StepTimes, ...]
    ends: Mapping[int, float]
    """Each rank's clock at its last event. Communications that nobody waits for may end later."""
    faults: tuple[Fault, ...]
    """First causes, by time."""

    def check(self) -> None:
        """Raises ReplayError with every fault, if there is one."""
        if self.faults:
            raise ReplayError(self.faults)
