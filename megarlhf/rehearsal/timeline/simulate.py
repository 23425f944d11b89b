"""Traces of several ranks, run together: when each computes, what it waits for, and where they do not fit together.

Each rank has one clock, that of its device's compute stream. What is assumed:

- A communication is *issued* at the clock and moves nothing; its `Wait` moves the clock to its end.
- A collective begins when every replayed member has issued it, and the group's previous one is over (as in a stream
  of NCCL), and takes its price. The n-th of a rank in a group is the n-th of every other; a group is its tuple of
  ranks, collectives between hosts apart: two process groups of the same ranks count as one.
- A message begins when both ends have issued it (rendezvous, as NCCL does) and the previous one from the same rank to
  the same rank in the same group is over. The sender's `Wait` waits for the receiver; issuing never blocks. A message
  of no bytes is complete for its sender at once.
- Ranks that are not replayed behave like those that are: a collective needs only the replayed members of its group. A
  message to or from a rank that is not replayed takes its price.
- Communications of different groups, and messages in opposite directions, do not slow one another or what is being
  computed. That is optimistic: they share wires, and kernels of NCCL take multiprocessors.
- Where ranks disagree about bytes, the most that anyone says is priced; of `all_to_all` that is no fault. Where they
  disagree about the operation, it and all that follows it in the group never completes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from megarlhf.rehearsal.timeline.deadlocks import (
    Call,
    Disagreement,
    IncompleteCommunication,
    Stream,
    explain,
    stream_of,
)
from megarlhf.rehearsal.timeline.simulated import (
    Communication,
    CommunicationKey,
    PhaseTimes,
    RankTimes,
    Replayed,
    StepTimes,
)
from megarlhf.rehearsal.timeline.trace import Collective, Compute, Event, Operation, Send, StepMark, Wait


class MessagePricing(Protocol):
    """Prices of communications that have all links to themselves. Equal arguments must cost the same: each is asked for
    once in a group."""

    def collective_seconds(self, operation: Operation, ranks: tuple[int, ...], nbytes: int, *, host: bool) -> float:
        """Seconds from the moment at which the last rank has issued it."""

    def message_seconds(self, src: int, dst: int, nbytes: int) -> float:
        """Seconds from the moment at which both ends have issued it."""


def label_by_size(ranks: tuple[int, ...]) -> str:
    """Default name of a group."""
    return f"{len(ranks)} ranks"


def replay(
    traces: Mapping[int, Sequence[Event]],
    price: MessagePricing,
    *,
    label: Callable[[tuple[int, ...]], str] = label_by_size,
) -> Replayed:
    """Run traces together, each from clock 0.

    traces: by global rank.
    label:  names a group in the result. For messages without a group it gets (source, destination).
    Raises: ValueError for a trace that is no trace: a number twice, a `Wait` for no number, a step marked twice, a rank
    in no group of its own, negative seconds. Traces that do not fit together are `Replayed.faults`.
    """
    replaying = _Replaying(traces, price, label)
    replaying.run()
    return Replayed(
        steps=_steps(replaying.ranks),
        ends={rank.rank: rank.clock for rank in replaying.ranks},
        faults=tuple(explain(traces, replaying.disagreements, replaying.waiting(), replaying.left())),
    )


class _Rank:
    """State of one rank: its trace, its position and the time it has spent."""

    def __init__(self, rank: int, trace: Sequence[Event]) -> None:
        self.rank = rank
        self.trace = trace
        self.index = 0
        self.clock = 0.0
        self.numbers: dict[int, tuple[_Pending, CommunicationKey] | None] = {}
        """Issued communications, by number; None for one that is known to be complete."""
        self.waits_for: _Pending | None = None
        self.phase: str | None = None
        self.tally = RankTimes()
        self.tallies: dict[str, RankTimes] = {}
        self.steps: dict[int | None, tuple[float, dict[str, RankTimes]]] = {}
        self.step_start = 0.0

    def enter(self, phase: str) -> None:
        """Start a phase."""
        self.phase = phase
        self.tally = self.tallies.setdefault(phase, RankTimes())

    def spend(self, until: float) -> float:
        """Advance the clock. Returns by how much."""
        seconds = until - self.clock
        if seconds <= 0:
            return 0.0
        self.clock = until
        self.tally.seconds += seconds
        return seconds

    def end_step(self, step: int | None) -> None:
        """Assign the time since the last mark to this step."""
        if step in self.steps:
            raise ValueError(f"{self.here()} marks step {step}, which it has marked before; mark each step once")
        self.steps[step] = (self.clock - self.step_start, self.tallies)
        self.step_start, self.tallies, self.phase = self.clock, {}, None

    def here(self) -> str:
        """Position, for errors."""
        return f"rank {self.rank}, event {self.index}"


@dataclass(slots=True)
class _Pending:
    """One communication, from the time at which the first rank issues it."""

    stream: _Stream
    position: int
    operation: Operation | None
    """The operation; None for a message."""
    nbytes: int
    ready: float = 0.0
    """Time at which the last rank so far has issued it."""
    start: float = 0.0
    end: float | None = None
    issued: list[tuple[_Rank, int, Communication]] = field(default_factory=list)
    """(rank, index of its event, sums to add to)"""
    waiting: list[_Rank] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    """State of a `Stream`."""

    key: Stream
    label: str
    positions: dict[int, int]
    """Number of communications that each replayed member has issued."""
    free: float = 0.0
    """Time at which the last communication ends."""
    pending: dict[int, _Pending] = field(default_factory=dict)
    """Communications that have not begun, by position."""
    prices: dict[tuple[Operation | None, int], float] = field(default_factory=dict)
    disagrees: bool = False
    """Whether a disagreement of this stream was reported."""
    broken: float = float("inf")
    """Position from which on nothing completes."""


class _Replaying:
    """State of all ranks and streams.

    The beginning of a communication depends only on when its ranks issue it and on the one before it in its stream. So
    no queue of events in time is needed: any rank runs on until it waits for something that has not begun.
    """

    def __init__(
        self, traces: Mapping[int, Sequence[Event]], price: MessagePricing, label: Callable[[tuple[int, ...]], str]
    ) -> None:
        self.price = price
        self.label = label
        self.ranks = [_Rank(rank, traces[rank]) for rank in sorted(traces)]
        self.traces = traces
        self.runnable = deque(self.ranks)
        self.streams: dict[Stream, _Stream] = {}
        self.disagreements: list[Disagreement] = []

    def run(self) -> None:
        """Run until every rank is done, or waits for what never comes."""
        while self.runnable:
            self._advance(self.runnable.popleft())
        for rank in self.ranks:
            if rank.tallies:
                rank.end_step(None)

    def _advance(self, rank: _Rank) -> None:
        rank.waits_for = None
        while rank.index < len(rank.trace):
            event = rank.trace[rank.index]
            if event.phase != rank.phase and not isinstance(event, StepMark):
                rank.enter(event.phase)
            if isinstance(event, Compute):
                if not event.seconds >= 0:
                    raise ValueError(f"{rank.here()} computes for {event.seconds} seconds; give 0 or more")
                rank.tally.compute[event.work] += event.seconds
                rank.spend(rank.clock + event.seconds)
            elif isinstance(event, Wait):
                if not self._wait(rank, event):
                    return
            elif isinstance(event, StepMark):
                rank.end_step(event.step)
            else:
                self._issue(rank, event)
            rank.index += 1

    def _issue(self, rank: _Rank, event: Call) -> None:
        """Issue the rank's next communication in a stream. It begins when its last rank issues it."""
        if event.number in rank.numbers:
            raise ValueError(f"{rank.here()} issues number {event.number} for the second time; give each number once")
        stream = self._stream(rank, event)
        position = stream.positions[rank.rank]
        stream.positions[rank.rank] = position + 1
        operation = event.operation if isinstance(event, Collective) else None
        pending = stream.pending.get(position)
        if pending is None:
            pending = stream.pending[position] = _Pending(stream, position, operation, event.nbytes)
        elif (pending.operation, pending.nbytes) != (operation, event.nbytes):
            self._compare(pending, operation, event.nbytes, rank.clock)
        key: CommunicationKey = (operation or ("send" if isinstance(event, Send) else "receive"), stream.label)
        pending.ready = max(pending.ready, rank.clock)
        pending.issued.append((rank, rank.index, rank.tally.communication[key]))
        sent_at_once = isinstance(event, Send) and event.nbytes == 0
        rank.numbers[event.number] = None if sent_at_once else (pending, key)
        if len(pending.issued) == len(stream.positions) and position < stream.broken:
            self._begin(pending)

    def _compare(self, pending: _Pending, operation: Operation | None, nbytes: int, clock: float) -> None:
        """Handle ranks that do not issue the same. Only the first disagreement of a stream is reported."""
        stream = pending.stream
        same_operation = pending.operation == operation
        pending.nbytes = max(pending.nbytes, nbytes)
        if not same_operation:
            stream.broken = min(stream.broken, pending.position)
        if not stream.disagrees and not (same_operation and operation == "all_to_all"):
            stream.disagrees = True
            kind: Literal["operation", "size"] = "size" if same_operation else "operation"
            time = max(clock, pending.ready)
            self.disagreements.append(Disagreement(kind, stream.key, pending.position, time))

    def _stream(self, rank: _Rank, event: Call) -> _Stream:
        key = stream_of(rank.rank, event)
        stream = self.streams.get(key)
        if stream is None:
            positions = {member: 0 for member in key.members() if member in self.traces}
            stream = _Stream(key, self.label(key.ranks or key.members()), positions)
            self.streams[key] = stream
        if rank.rank not in stream.positions:
            raise ValueError(f"{rank.here()} is a collective of ranks {key.ranks}, which do not include it")
        if key.pair is not None and key.pair[0] == key.pair[1]:
            raise ValueError(f"{rank.here()} is a message of the rank to itself; copy instead")
        return stream

    def _begin(self, pending: _Pending) -> None:
        """Begin a communication that all ranks have issued: its start and end are known now, and ranks that wait for it
        go on."""
        stream = pending.stream
        del stream.pending[pending.position]
        key = (pending.operation, pending.nbytes)
        seconds = stream.prices.get(key)
        if seconds is None:
            seconds = stream.prices[key] = self._price(stream.key, *key)
        pending.start = max(pending.ready, stream.free)
        pending.end = stream.free = pending.start + seconds
        for _, _, row in pending.issued:
            row.count += 1
            row.nbytes += pending.nbytes
            row.seconds += seconds
        pending.issued.clear()
        self.runnable.extend(pending.waiting)
        pending.waiting.clear()

    def _price(self, key: Stream, operation: Operation | None, nbytes: int) -> float:
        if operation is None:
            assert key.pair is not None, "what is no collective is a message"
            seconds = self.price.message_seconds(*key.pair, nbytes)
        else:
            seconds = self.price.collective_seconds(operation, key.ranks, nbytes, host=key.host)
        if not seconds >= 0:
            raise ValueError(f"{operation or 'a message'} of {nbytes} bytes in {key} costs {seconds}; give 0 or more")
        return seconds

    @staticmethod
    def _wait(rank: _Rank, event: Wait) -> bool:
        """Advance the clock to the end of a communication. Returns False if it is not known yet."""
        if event.number not in rank.numbers:
            raise ValueError(f"{rank.here()} waits for number {event.number}, which it has not issued")
        issued = rank.numbers[event.number]
        if issued is None:
            return True
        pending, key = issued
        if pending.end is None:
            pending.waiting.append(rank)
            rank.waits_for = pending
            return False
        rank.numbers[event.number] = None
        if pending.end > rank.clock:
            row = rank.tally.communication[key]
            row.idle += rank.spend(pending.ready)
            row.queued += rank.spend(pending.start)
            row.transfer += rank.spend(pending.end)
        return True

    def waiting(self) -> list[IncompleteCommunication]:
        """For each rank that is not done, the communication that it waits for."""
        return [
            self._incomplete(rank.waits_for, rank, rank.index, rank.clock)
            for rank in self.ranks
            if rank.waits_for is not None
        ]

    def left(self) -> list[IncompleteCommunication]:
        """For each stream, the first communication that some rank has issued and that has not begun."""
        firsts = [stream.pending[min(stream.pending)] for stream in self.streams.values() if stream.pending]
        return [self._incomplete(first, *first.issued[0][:2], first.ready) for first in firsts]

    @staticmethod
    def _incomplete(pending: _Pending, rank: _Rank, event: int, seconds: float) -> IncompleteCommunication:
        positions = pending.stream.positions
        missing = tuple(member for member, issued in positions.items() if issued <= pending.position)
        return IncompleteCommunication(rank.rank, event, seconds, pending.stream.key, pending.position, missing)


def _steps(ranks: Sequence[_Rank]) -> tuple[StepTimes, ...]:
    """Sums of all ranks by step and phase. The time after the last step comes at the end."""
    steps = {step for rank in ranks for step in rank.steps}
    times = []
    for step in sorted(steps, key=lambda step: (step is None, step or 0)):
        seconds: dict[int, float] = {}
        phases: defaultdict[str, dict[int, RankTimes]] = defaultdict(dict)
        for rank in ranks:
            if step in rank.steps:
                seconds[rank.rank], tallies = rank.steps[step]
                for phase, tally in tallies.items():
                    phases[phase][rank.rank] = tally
        times.append(StepTimes(step, seconds, {phase: PhaseTimes(of) for phase, of in phases.items()}))
    return tuple(times)
