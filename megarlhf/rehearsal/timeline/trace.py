"""What one rank does in time: stretches of computing, and messages. Plain data, made by a rehearsed rank and replayed.

A trace is a list of events in the order in which the rank issues them. Messages are issued and later waited for; one
that is not asynchronous is waited for by the very next event.
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
"""What a collective does. A list of tensors and one flat tensor are the same operation."""

Work = Literal["matmul", "attention", "memory", "kernel", "rollout", "offload", "host"]
"""What bounds an operation: products, attention, memory traffic, a kernel of ours, the rollout engines, copies to host
memory and back, or nothing that is priced."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The device computes for so long, by the hardware file."""

    phase: str
    seconds: float
    work: Work = "memory"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation is issued."""

    phase: str
    operation: Operation
    ranks: tuple[int, ...]
    """Global ranks of the group, in its order."""
    nbytes: int
    """The whole tensor: of all_reduce, broadcast and reduce what each rank holds; of all_gather and gather what is
    gathered from all; of reduce_scatter and scatter what is scattered to all; of all_to_all what this rank sends."""
    number: int
    """By which a `Wait` of the same rank names it; each number once."""
    host: bool = False
    """Between hosts (objects, tensors on the CPU), not between devices."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message to one rank is issued."""

    phase: str
    peer: int
    """Global rank."""
    nbytes: int
    number: int
    ranks: tuple[int, ...] = ()
    """Global ranks of the group; messages between the same two ranks in different groups are different streams."""


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
    """The device goes on when the message is complete."""

    phase: str
    number: int


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step of the run is done; the time between two marks is that of a step."""

    phase: str
    step: int


Event = Compute | Collective | Send | Receive | Wait | StepMark
