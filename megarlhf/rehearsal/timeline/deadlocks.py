"""Explanation of communications that disagree or never complete: the first causes, in sentences.

The replay tells where it stopped; the complete traces tell the rest. A rank that is stuck because of another one is no
cause of its own. From every such rank this walks to the rank it waits for, until it comes to a call that is not in the
other's trace (`missing`), to a disagreement, or back to where it was (`deadlock`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarlhf.rehearsal.timeline.trace import Collective, Event, Receive, Send

Call = Collective | Send | Receive


class Stream(NamedTuple):
    """Communications that run one after the other: the collectives of a group, or one group's messages from one rank to
    another. The n-th of a rank belongs to the n-th of every other member."""

    ranks: tuple[int, ...]
    """Ranks of the group, in its order. For messages it may be empty."""
    pair: tuple[int, int] | None = None
    """(source, destination) of messages; None for collectives."""
    host: bool = False

    def members(self) -> tuple[int, ...]:
        """The ranks that take part in each communication."""
        return self.ranks if self.pair is None else self.pair


class IncompleteCommunication(NamedTuple):
    """A communication that is not complete, and one rank that has issued it or waits for it."""

    rank: int
    event: int
    """Index in the rank's trace: of its `Wait`, or of the call if it does not wait."""
    seconds: float
    stream: Stream
    position: int
    """Place in the stream, from 0."""
    missing: tuple[int, ...]
    """Replayed ranks that have not issued it."""


class Disagreement(NamedTuple):
    """Two ranks issue different calls at one position of a stream."""

    kind: Literal["operation", "size"]
    stream: Stream
    position: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A first cause why these ranks cannot run together."""

    kind: Literal["operation", "size", "missing", "deadlock"]
    ranks: tuple[int, ...]
    """Ranks that take part, including the one that misses something."""
    phase: str
    """Phase of the rank that comes to it first."""
    events: Mapping[int, int]
    """Index in the trace of each rank that issues it; for a deadlock, index of the `Wait` at which the rank stands."""
    seconds: float
    """Time at which the replay came to it."""
    sentence: str


class ReplayError(ValueError):
    """The traces do not fit together."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(fault.sentence for fault in faults))
        self.faults = faults


def stream_of(rank: int, event: Call) -> Stream:
    """Stream of a rank's call."""
    if isinstance(event, Collective):
        return Stream(event.ranks, None, event.host)
    return Stream(event.ranks, (rank, event.peer) if isinstance(event, Send) else (event.peer, rank))


def explain(
    traces: Mapping[int, Sequence[Event]],
    disagreements: Sequence[Disagreement],
    waiting: Sequence[IncompleteCommunication],
    left: Sequence[IncompleteCommunication],
) -> list[Fault]:
    """Faults, by the time at which the replay came to them.

    waiting: for each rank that is stuck, the communication for which it waits.
    left:    communications that some ranks have issued and others have not, and for which nobody waits. If ranks are
             stuck they are a consequence, and no fault.
    """
    if not (disagreements or waiting or left):
        return []
    streams = {call.stream for call in disagreements} | {call.stream for call in (*waiting, *left)}
    explainer = _Explainer(traces, streams)
    faults = [explainer.disagreement(call) for call in disagreements]
    disagreeing = {call.stream for call in disagreements}
    if not waiting:
        faults += explainer.missing(call for call in left if call.stream not in disagreeing)
    elsewhere = [call for call in waiting if call.stream not in disagreeing]
    faults += explainer.missing(call for call in elsewhere if explainer.never(call))
    behind = {call.rank: call for call in elsewhere if not explainer.never(call)}
    faults += [explainer.deadlock(cycle, len(waiting) - len(cycle)) for cycle in _cycles(behind)]
    assert faults, "what waits or is left over has a cause"
    return sorted(faults, key=lambda fault: (fault.seconds, fault.ranks))


def _cycles(behind: Mapping[int, IncompleteCommunication]) -> Iterator[list[IncompleteCommunication]]:
    """Each cycle of ranks that wait for each other, once. Of several ranks that one waits for, the first is
    followed."""
    seen: set[int] = set()
    for first in sorted(behind):
        path: list[int] = []
        rank = first
        while rank in behind and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = behind[rank].missing[0]
        if rank in path:
            yield [behind[rank] for rank in path[path.index(rank) :]]


class _Explainer:
    """Traces, and the places of some streams' calls in them."""

    def __init__(self, traces: Mapping[int, Sequence[Event]], streams: set[Stream]) -> None:
        self.traces = traces
        self.calls: dict[Stream, dict[int, list[int]]] = {stream: defaultdict(list) for stream in streams}
        for rank, trace in traces.items():
            for index, event in enumerate(trace):
                if isinstance(event, Call) and (stream := stream_of(rank, event)) in streams:
                    self.calls[stream][rank].append(index)

    def phase(self, rank: int, index: int) -> str:
        return self.traces[rank][index].phase

    def never(self, waiting: IncompleteCommunication) -> list[int]:
        """Missing ranks whose whole trace does not have the call."""
        calls = self.calls[waiting.stream]
        return [rank for rank in waiting.missing if len(calls[rank]) <= waiting.position]

    def disagreement(self, place: Disagreement) -> Fault:
        """Fault with the call of every rank."""
        events = self._events(place.stream, place.position)
        ranks_by_call: dict[str, list[int]] = defaultdict(list)
        for rank, index in events.items():
            ranks_by_call[self._call(rank, index)].append(rank)
        number = f"the {_ordinal(place.position + 1)} {_what(place.stream)}"
        calls = "; ".join(
            f"{_ranks(ranks)}: {call} ({self._at(events, ranks)})" for call, ranks in ranks_by_call.items()
        )
        advice = "both ends of a message" if place.stream.pair else "all ranks of a group"
        sentence = f"{number} is not the same on all: {calls}; {advice} must issue the same, in one order"
        first = min(events)
        return Fault(place.kind, tuple(events), self.phase(first, events[first]), events, place.seconds, sentence)

    def missing(self, waiting: Iterable[IncompleteCommunication]) -> Iterator[Fault]:
        """One fault for each stream: its first communication that a rank never issues."""
        streams: set[Stream] = set()
        for call in sorted(waiting, key=lambda call: (call.position, call.seconds, call.rank)):
            if call.stream not in streams:
                streams.add(call.stream)
                yield self._missing(call)

    def _missing(self, waiting: IncompleteCommunication) -> Fault:
        stream, position = waiting.stream, waiting.position
        events, never = self._events(stream, position), self.never(waiting)
        issuers = [rank for rank in events if rank not in never]
        rank = waiting.rank
        call, where = self._call(rank, events[rank]), self._at(events, issuers)
        if stream.pair:
            source, destination = stream.pair
            toward, never_does = ("to", "receives") if rank == source else ("from", "sends")
            peer = destination if rank == source else source
            sentence = f"rank {rank} {call} (its {_ordinal(position + 1)} message {toward} it, {where}), "
            sentence += f"which rank {peer} never {never_does}"
        else:
            issue = f"{_ranks(issuers)} {'issues' if len(issuers) == 1 else 'issue'}"
            sentence = f"{issue} {call} ({where}), the {_ordinal(position + 1)} {_what(stream)}, "
            sentence += f"which {_ranks(never)} never {'issues' if len(never) == 1 else 'issue'}"
        sentence += f"; {self._totals(stream)}; {_ADVICE[stream.pair is None]}"
        return Fault("missing", (*issuers, *never), self.phase(rank, events[rank]), events, waiting.seconds, sentence)

    def deadlock(self, cycle: Sequence[IncompleteCommunication], others: int) -> Fault:
        """Fault of ranks that wait for each other; a missing call if they do not issue equally many."""
        first = min(cycle, key=lambda waiting: (waiting.seconds, waiting.rank))
        circle = " -> ".join(str(waiting.rank) for waiting in (*cycle, cycle[0]))
        uneven = [
            waiting.stream for waiting in cycle if len({len(calls) for calls in self._issued(waiting.stream)}) > 1
        ]
        parts = [
            f"{_ranks([waiting.rank for waiting in cycle])} wait for each other ({circle})",
            *(self.waits(waiting) for waiting in cycle),
            *([f"{others} other {'rank stands' if others == 1 else 'ranks stand'} still too"] if others else []),
            *(self._totals(stream) for stream in dict.fromkeys(uneven)),
            _ADVICE[first.stream.pair is None] if uneven else "issue them in one order on all ranks",
        ]
        events = {waiting.rank: waiting.event for waiting in cycle}
        phase = self.phase(first.rank, first.event)
        kind: Literal["missing", "deadlock"] = "missing" if uneven else "deadlock"
        return Fault(kind, tuple(events), phase, events, max(waiting.seconds for waiting in cycle), "; ".join(parts))

    def waits(self, waiting: IncompleteCommunication) -> str:
        """Sentence: which call a rank waits for, since when, and where the missing ranks would issue it."""
        since = f"since {waiting.seconds:.6g} s in {self.phase(waiting.rank, waiting.event)} (event {waiting.event})"
        what = f"the {_ordinal(waiting.position + 1)} {_what(waiting.stream)}"
        calls = self.calls[waiting.stream]
        reasons = [
            f"rank {rank} issues at its event {calls[rank][waiting.position]}"
            if waiting.position < len(calls[rank])
            else f"rank {rank} never issues"
            for rank in waiting.missing
        ]
        return f"rank {waiting.rank} waits {since} for {what}, which {' and '.join(reasons)}"

    def _issued(self, stream: Stream) -> list[list[int]]:
        return [self.calls[stream][rank] for rank in stream.members() if rank in self.traces]

    def _events(self, stream: Stream, position: int) -> dict[int, int]:
        """Index of each rank's call at `position` of the stream, for the ranks that have one."""
        return {rank: calls[position] for rank, calls in sorted(self.calls[stream].items()) if position < len(calls)}

    def _call(self, rank: int, index: int) -> str:
        """A rank's call as text: for a message a predicate, for a collective its object."""
        event = self.traces[rank][index]
        assert isinstance(event, Call)
        if isinstance(event, Collective):
            article = "an" if event.operation[0] == "a" else "a"
            return f"{article} {event.operation} of {event.nbytes:,} bytes in {event.phase}"
        verb, toward = ("sends", "to") if isinstance(event, Send) else ("receives", "from")
        return f"{verb} {event.nbytes:,} bytes {toward} rank {event.peer} in {event.phase}"

    @staticmethod
    def _at(events: Mapping[int, int], ranks: Sequence[int]) -> str:
        indices = sorted({events[rank] for rank in ranks})
        return f"event{'s' if len(indices) > 1 else ''} {_listed(indices)}"

    def _totals(self, stream: Stream) -> str:
        """Sentence: number of calls of each rank in a stream, and the first call that is in different phases."""
        ranks = [rank for rank in stream.members() if rank in self.traces]
        by_number: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_number[len(self.calls[stream][rank])].append(rank)
        counts = " and ".join(f"{number:,} on {_ranks(some)}" for number, some in sorted(by_number.items()))
        text = f"{_what(stream, plural=True)} in all: {counts}"
        for position, indices in enumerate(zip(*self._issued(stream), strict=False)):
            phases = [self.phase(rank, index) for rank, index in zip(ranks, indices, strict=True)]
            other = next((place for place, phase in enumerate(phases) if phase != phases[0]), None)
            if other is not None:
                first = f"{phases[0]} on rank {ranks[0]}, {phases[other]} on rank {ranks[other]}"
                return f"{text}, and the {_ordinal(position + 1)} is the first in different phases ({first})"
        return text


_ADVICE = {
    True: "all ranks of a group must issue the same collectives, in one order",
    False: "every message needs both ends",
}
"""Advice where something is missing, by whether it is a collective."""


def _what(stream: Stream, plural: bool = False) -> str:
    ending = "s" if plural else ""
    if stream.pair is None:
        return f"{'host ' if stream.host else ''}collective{ending} of group ({_listed(stream.ranks)})"
    group = f" in group ({_listed(stream.ranks)})" if stream.ranks else ""
    return f"message{ending} from rank {stream.pair[0]} to rank {stream.pair[1]}{group}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as text: all of a few; of many the first ones, the last one and their count."""
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:3]))}, ..., {numbers[-1]}: {len(numbers)} in all"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"
