"""Messages between a rank and a worker of environments, and memory that says whose code is running.

Only the standard library is imported.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megarlhf.rollout.environments.answer import Answer, Turn
from megarlhf.rollout.tools.start import ToolsStart


class AnsweredCall(NamedTuple):
    """A call of an environment, with its answer."""

    turn: Turn | None
    """Turn that `step` got; None: the call of `reset`, with which a conversation begins."""
    answer: Answer


class WorkerStart(NamedTuple):
    """First message to a worker."""

    function: str
    args: Mapping[str, Any]
    interface: str
    """Interface that the environment has: `environment.interface`."""
    path: list[str] | None
    """`sys.path` of the rank; None: the process keeps its own, as it runs under another interpreter."""
    seconds_per_step: float
    running_fd: int
    """File descriptor of the `RunningCode`."""
    tools: ToolsStart | None = None
    """Tools in place of a class."""


class BeginCall(NamedTuple):
    """Request to begin a conversation."""

    key: int
    call: int
    """Number that the result must have, so that it is not taken for that of another call."""
    fields: bytes
    """Fields of the prompt, pickled: what cannot be read is a failure of this conversation only."""
    seed: int
    history: Sequence[AnsweredCall]
    """Calls to repeat: empty for a new conversation."""


class StepCall(NamedTuple):
    """Request to answer a turn."""

    key: int
    call: int
    turn: Turn


class ForgetCall(NamedTuple):
    """Message that a conversation is over. It has no result."""

    key: int


class CallResult(NamedTuple):
    """Result of a `BeginCall` or a `StepCall`."""

    key: int
    call: int
    answer: Answer | None = None
    error: str = ""
    late: bool = False
    drifted: bool = False


class Running(NamedTuple):
    """State of a worker."""

    key: int
    """Conversation whose code is running; 0: none."""
    since: float
    """Time at which it was entered, of `time.monotonic`."""
    alive: float
    """Latest time at which the worker itself had the process."""


class RunningCode:
    """Memory that a rank and a worker share. The worker writes whose code it is running; the rank can read that when
    the worker hangs, and after it has crashed."""

    def __init__(self, fd: int) -> None:
        """fd: file descriptor of `new_running_fd`"""
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._values = memoryview(self._memory).cast("q")  # each value is written and read as a whole
        self.alive()

    def enter(self, key: int) -> None:
        self._values[1] = time.monotonic_ns()
        self._values[0] = key

    def leave(self) -> None:
        self._values[2] = time.monotonic_ns()
        self._values[0] = 0

    def alive(self) -> None:
        self._values[2] = time.monotonic_ns()

    def read(self) -> Running:
        while True:
            key, since, alive = self._values[0], self._values[1], self._values[2]
            if key == self._values[0]:  # else `since` may be that of another conversation
                return Running(key, since / 1e9, alive / 1e9)

    def close(self) -> None:
        self._values.release()
        self._memory.close()


def new_running_fd() -> int:
    """File descriptor of memory for a `RunningCode`, all zeros."""
    fd = os.memfd_create("megarlhf-running")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
