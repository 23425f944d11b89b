"""The same small job rehearsed, told in the form of a real run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.rehearsal.real_run import Place, Seen
from benchmarks.rehearsal.recorded import Message
from megarlhf.rehearsal.job import Job, RankRecord
from megarlhf.rehearsal.program import Rank
from megarlhf.rehearsal.timeline.trace import Collective, Event, Receive, Send, StepMark


class NoPrice:
    """Nothing takes time."""

    def operation_seconds(self, *args: object, **kwargs: object) -> float:
        return 0.0

    def offload_seconds(self, nbytes: int) -> float:
        return 0.0


def rehearsed_rank(job: Job, rank: int) -> Seen:
    """Rehearse one rank in this process, which must not be in a process group."""
    record = Rank(replace(job, rank=rank), NoPrice()).run()
    dist.destroy_process_group()
    return seen(record)


def seen(record: RankRecord) -> Seen:
    """Raises: AssertionError where the rank's table of messages is another one than its trace."""
    peaks: dict[Place, int] = {}
    ends: dict[Place, int] = {}
    for phase in record.memory:
        place = phase.step, phase.phase
        peaks[place] = max(peaks.get(place, 0), phase.peak)
        ends[place] = phase.end
    counts, nbytes = messages(record.events, record.rank)
    in_trace, in_table = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for message, count in counts.items():
        in_trace[(*message[:3], "count")] += count
        in_trace[(*message[:3], "bytes")] += nbytes[message]
    for line, count, size in record.messages:
        in_table[(line.step, line.phase, line.operation, "count")] += count
        in_table[(line.step, line.phase, line.operation, "bytes")] += size
    assert +in_trace == +in_table, f"table and trace of rank {record.rank} differ: {in_table - in_trace}"
    return Seen(record.rank, peaks, dict(counts), dict(nbytes), ends)


def messages(events: list[Event], rank: int) -> tuple[Counter[Message], Counter[Message]]:
    """Counted by place. A mark ends a step; what comes before the first one belongs to step 0."""
    counts: Counter[Message] = Counter()
    nbytes: Counter[Message] = Counter()
    step = 0
    for event in events:
        if isinstance(event, StepMark):
            step = event.step + 1
        if not isinstance(event, Collective | Send | Receive):
            continue
        if isinstance(event, Collective):
            message = Message(step, event.phase, event.operation, event.ranks)
        else:
            name = "send" if isinstance(event, Send) else "receive"
            message = Message(step, event.phase, name, (*event.ranks, rank, event.peer))
        counts[message] += 1
        nbytes[message] += event.nbytes
    return counts, nbytes
