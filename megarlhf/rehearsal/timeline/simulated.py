"""What a replay finds: times of steps, phases and ranks, faults, and a timeline. Seconds throughout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from megarlhf.rehearsal.timeline.deadlocks import Fault, ReplayError, Stuck
from megarlhf.rehearsal.timeline.trace import Operation, Work

Message = Literal["send", "receive"]

State = Literal["compute", "idle", "queued", "transfer"]
"""What a rank does: it computes, waits for a rank that is late, for earlier communications of the same group, or for
the communication itself."""


@dataclass(frozen=True, slots=True)
class Communication:
    """One operation of one rank in groups of one label, in one phase of one step."""

    count: int
    """Completed ones that were issued in the phase."""
    nbytes: int
    seconds: float
    """Their price. What of it is not in `transfer` was hidden behind computing, or behind an idle wait."""
    idle: float
    """Exposed by waits in this phase: another rank had not issued it yet. A pipeline's bubble and uneven work."""
    queued: float
    """Exposed: all had issued it, but earlier communications of the same group were not over."""
    transfer: float
    """Exposed: it was under way."""

    def exposed(self) -> float:
        """How far waits have moved the clock."""
        return self.idle + self.queued + self.transfer


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank in one phase of one step."""

    seconds: float
    """By how much events of the phase move the rank's clock: `busy` and `exposed` together."""
    compute: Mapping[Work, float]
    communication: Mapping[tuple[Operation | Message, str], Communication]
    """By operation and the label of the group."""

    def busy(self) -> float:
        """Seconds of computing."""
        return sum(self.compute.values())

    def exposed(self) -> float:
        """Seconds of waiting."""
        return sum(each.exposed() for each in self.communication.values())

    def idle(self) -> float:
        """Seconds of waiting for ranks that were late."""
        return sum(each.idle for each in self.communication.values())


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The replayed ranks in one phase of one step; those only that have events of it."""

    ranks: Mapping[int, RankTimes]

    def seconds(self) -> float:
        """Of the rank that spends the most in it."""
        return max(rank.seconds for rank in self.ranks.values())

    def bubble(self) -> float:
        """The share in which ranks do not compute: 1 - seconds of computing / (ranks x seconds of the phase). A rank
        that is through early, and waits in the next phase only, counts as not computing here."""
        span = self.seconds() * len(self.ranks)
        return 1 - sum(rank.busy() for rank in self.ranks.values()) / span if span else 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """From one `Mark` to the next."""

    step: int | None
    """As the mark that ends it says; None for what follows a rank's last mark."""
    ranks: Mapping[int, float]
    """By how much each rank's clock moves."""
    phases: Mapping[str, PhaseTimes]
    """In the order in which the first rank comes to them."""

    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(self.ranks.values())


class TimeSegment(NamedTuple):
    """A stretch of a rank's time that looks the same."""

    rank: int
    phase: str
    kind: State
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the traces. With faults, times are those of the events that were reached."""

    steps: tuple[StepTimes, ...]
    ends: Mapping[int, float]
    """Each rank's clock at its last event; communications that nobody waits for may end later."""
    timeline: tuple[TimeSegment, ...]
    """By rank and time; one rank's segments leave no gap between 0 and its end."""
    faults: tuple[Fault, ...]
    """First causes, by time."""
    stuck: tuple[Stuck, ...]
    """Ranks that did not come to their trace's end, followers of faults too."""
    unmatched_messages: int
    """Sends to and receives from ranks that are not replayed."""
    overlapping: int
    """Communications that began while another group's was under way on the rank, counted on each; they were taken
    not to slow each other down."""
    overlapping_seconds: float
    """How long those ran together, of all ranks."""

    def check(self) -> None:
        """Raises ReplayError with every fault, if there is one."""
        if self.faults:
            raise ReplayError(self.faults)


def segments_of(
    rank: int, ends: Sequence[float], looks: Sequence[tuple[str, State]], limit: int | None
) -> Iterator[TimeSegment]:
    """The segments of a rank. More than `limit`, and its time is cut into as many equal slices instead, each of which
    looks like what most of it is spent on.

    ends: where each segment ends; the first begins at 0, each other one at the end of the one before it.
    looks: its phase and what the rank does.
    """
    if limit is not None and len(ends) > limit:
        ends, looks = _sliced(ends, looks, limit)
    for start, end, (phase, kind) in zip(chain((0.0,), ends), ends, looks, strict=False):
        yield TimeSegment(rank, phase, kind, start, end)


def _sliced(
    ends: Sequence[float], looks: Sequence[tuple[str, State]], limit: int
) -> tuple[list[float], list[tuple[str, State]]]:
    """At most `limit` segments in the place of many; equal neighbours are one."""
    new_ends: list[float] = []
    new_looks: list[tuple[str, State]] = []
    place, at = 0, 0.0
    for number in range(1, limit + 1):
        slice_end = ends[-1] * number / limit if number < limit else ends[-1]
        shares: dict[tuple[str, State], float] = defaultdict(float)
        while at < slice_end:
            until = min(ends[place], slice_end)
            shares[looks[place]] += until - at
            at = until
            place += ends[place] <= at
        if not shares:
            continue
        look = max(shares, key=lambda key: shares[key])
        if new_looks and new_looks[-1] == look:
            new_ends[-1] = slice_end
        else:
            new_ends.append(slice_end)
            new_looks.append(look)
    return new_ends, new_looks


def overlaps(transfers: Sequence[tuple[float, float, int]]) -> tuple[int, float]:
    """How many of one rank's transfers (start, end, group) begin while one of another group is under way, and how
    long they run beside it."""
    number, seconds = 0, 0.0
    last_group, last_end, other_end = -1, 0.0, 0.0  # the latest end of all, and the latest of other groups than its own
    for start, end, group in sorted(transfers):
        rival = other_end if group == last_group else last_end
        if start < rival:
            number += 1
            seconds += min(end, rival) - start
        if group == last_group:
            last_end = max(last_end, end)
        elif end > last_end:
            last_group, last_end, other_end = group, end, last_end
        else:
            other_end = max(other_end, end)
    return number, seconds
