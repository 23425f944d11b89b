"""Traces written by hand, prices that are made up, and what a test asks a replay."""

from dataclasses import dataclass

import pytest

from megarlhf.rehearsal.timeline.deadlocks import ReplayError
from megarlhf.rehearsal.timeline.simulate import replay
from megarlhf.rehearsal.timeline.trace import Collective, Compute, Receive, Send, StepMark, Wait


@dataclass
class Prices:
    """So many seconds a byte; what was asked for is kept."""

    collective: float = 0.0
    message: float = 0.0

    def __post_init__(self):
        self.asked = []

    def collective_seconds(self, operation, ranks, nbytes, *, host):
        self.asked.append((operation, ranks, nbytes, host))
        return self.collective * nbytes

    def message_seconds(self, src, dst, nbytes):
        self.asked.append((src, dst, nbytes))
        return self.message * nbytes


class Writer:
    """Writes a trace: numbers are given in order."""

    def __init__(self, phase="train/actor"):
        self.phase = phase
        self.events = []
        self.number = 0

    def compute(self, seconds, work="matmul"):
        self.events.append(Compute(self.phase, seconds, work))
        return self

    def collective(self, ranks, nbytes=8, operation="all_reduce", wait=True, host=False):
        self.number += 1
        self.events.append(Collective(self.phase, operation, tuple(ranks), nbytes, self.number, host))
        return self.wait(self.number) if wait else self

    def send(self, peer, nbytes=8, wait=True, ranks=()):
        self.number += 1
        self.events.append(Send(self.phase, peer, nbytes, self.number, tuple(ranks)))
        return self.wait(self.number) if wait else self

    def receive(self, peer, nbytes=8, wait=True, ranks=()):
        self.number += 1
        self.events.append(Receive(self.phase, peer, nbytes, self.number, tuple(ranks)))
        return self.wait(self.number) if wait else self

    def wait(self, number):
        self.events.append(Wait(self.phase, number))
        return self

    def mark(self, step):
        self.events.append(StepMark(self.phase, step))
        return self


def run(traces, price=None, **others):
    return replay({rank: writer.events for rank, writer in traces.items()}, price or Prices(), **others)


def only_fault(traces, **others):
    """The one fault of traces that have one; every rank's time up to it is kept."""
    replayed = run(traces, **others)
    assert len(replayed.faults) == 1, [fault.sentence for fault in replayed.faults]
    with pytest.raises(ReplayError, match="rank") as raised:
        replayed.check()
    assert str(raised.value) == replayed.faults[0].sentence
    return replayed.faults[0], replayed


def times(replayed, rank, phase="train/actor", step=None):
    steps = {each.step: each for each in replayed.steps}
    return steps[step].phases[phase].ranks[rank]


def bubble(phase):
    """The share of a phase in which ranks do not compute: 1 - seconds of computing / (ranks x seconds of the phase)."""
    return 1 - sum(rank.busy() for rank in phase.ranks.values()) / (phase.seconds() * len(phase.ranks))
