"""Traces: the computing and the messages of one rank. Plain data, made by a rehearsed rank and replayed.

A trace is a list of events in the order in which the rank issues them. Messages are issued and later waited for; a
message that is not asynchronous is waited for by the very next event. Example:

    Compute("train/actor", 0.3, "matmul"), Collective("train/actor", "all_reduce", (0, 1), 4096, number=1),
    Wait("train/actor", 1), StepMark("between phases", 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
]
"""Operation of a collective, for a list of tensors as for one flat tensor."""

Work = Literal["matmul", "attention", "memory", "kernel", "rollout", "offload", "host"]
"""Resource that bounds an operation: products, attention, memory traffic, a kernel of ours, the rollout engines, copies
to host memory and back; `host` is not priced."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The device computes for this time, by the hardware file."""

    phase: str
    seconds: float
    work: Work = "memory"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective is issued."""

    phase: str
    operation: Operation
    ranks: tuple[int, ...]
    """Global ranks of the group, in its order."""
    nbytes: int
    """Bytes of the whole tensor: for all_reduce, broadcast and reduce what each rank holds; for all_gather and gather
    what is gathered from all; for reduce_scatter and scatter what is scattered to all; for all_to_all what this rank
    sends."""
    number: int
    """Number by which a `Wait` of the same rank names it. Each number is used once."""
    host: bool = False
    """Whether it is between hosts (objects, tensors on the CPU), not between devices."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message to one rank is issued."""

    phase: str
    peer: int
    """Global rank."""
    nbytes: int
    number: int
    ranks: tuple[int, ...] = ()
    """Global ranks of the group. Messages between the same two ranks in different groups are different streams."""


@dataclass(frozen=True, slots=True)
class Receive:
    """The other end of a `Send`."""

    phase: str
    peer: int
    nbytes: int
    number: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """The device waits until the message is complete."""

    phase: str
    number: int


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step of the run is done. The time between two marks is that of a step."""

    phase: str
    step: int


Event = Compute | Collective | Send | Receive | Wait | StepMark
