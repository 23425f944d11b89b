"""Source of an engine's samples: those that it begins with, and chunks that it takes from a common queue."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megarlhf.collective_errors import from_first_rank
from megarlhf.rollout.balance import EngineAssignment

NOTHING = -1
"""Number of a chunk where none is taken."""


def rendezvous_store() -> dist.Store:
    """Store of the default process group, which rank 0's process serves."""
    # torch has no public function for it; vLLM and torchrun's agent use this one too.
    return dist.distributed_c10d._get_default_store()


def agreed_key() -> str:
    """Unique key in the store, the same on all ranks. Collective."""
    return f"megarlhf/rollout/{from_first_rank(uuid.uuid4().hex)}"


class SharedCounter:
    """Counter that gives 0, 1, 2, ... to all ranks, each number once. It is kept in a store, and each use costs a
    message to the machine of rank 0."""

    def __init__(self, store: Callable[[], dist.Store], key: str) -> None:
        """store: called at each use; key: the same on all ranks, and unique"""
        self._store, self._key, self._round = store, key, 0

    def restart(self) -> None:
        """Begin at 0 again. Every rank calls it, each at its own time: each round has its own key."""
        self._round += 1

    def next(self, count: int = 1) -> int:
        """Take `count` numbers; returns the first."""
        return int(self._store().add(f"{self._key}/{self._round}", count)) - count


class PromptQueue:
    """Rows of one engine, the same on all its ranks.

    The engine takes a chunk from the queue when vLLM has all its requests in the batch and has room for more. The first
    rank of an engine takes a number from the counter. The others get it when the engine's ranks agree on their state
    after a step (`generate_loop.run_in_lockstep`).
    """

    def __init__(self, assignment: EngineAssignment, engine: int, counter: SharedCounter | None = None) -> None:
        """`counter`: on the first rank of an engine; None on the others."""
        self.first = assignment.first[engine]
        self._queue, self._counter = assignment.queue, counter
        self._max_unfinished = assignment.max_unfinished
        self._largest = max(map(len, assignment.queue), default=0)
        self.is_open = bool(assignment.queue)
        """Whether the queue may have further chunks."""

    def wants_more(self, unfinished: int, has_room: bool) -> bool:
        """Whether an engine with `unfinished` samples takes a chunk. It may have no more than a fair share at once;
        otherwise the engine that begins first would take samples for which others are idle."""
        return self.is_open and (not unfinished or (has_room and unfinished + self._largest <= self._max_unfinished))

    def ask(self) -> int:
        """Number of this engine's next chunk; `NOTHING` on ranks without the counter."""
        return NOTHING if self._counter is None else self._counter.next()

    def take(self, number: int) -> Sequence[int]:
        """Rows of the chunk; none if all chunks are taken."""
        self.is_open = number < len(self._queue)
        return self._queue[number] if self.is_open else ()

    def close(self) -> None:
        """Close the queue for all engines, because this one was asked to stop."""
        if self.is_open and self._counter is not None:
            self._counter.next(len(self._queue))
        self.is_open = False
