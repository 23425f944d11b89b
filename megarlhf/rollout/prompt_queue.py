"""Where an engine has its samples from: those that it begins with, and those that it then asks for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megarlhf.collective_errors import from_first_rank
from megarlhf.rollout.balance import Deal

NOTHING = -1
"""In place of a number of the queue: nothing is asked for."""


def rendezvous_store() -> dist.Store:
    """The store through which the ranks of the run have found each other, served by rank 0's process."""
    # torch has no public name for it; vLLM and torchrun's agent ask the same way.
    return dist.distributed_c10d._get_default_store()


def agreed_key() -> str:
    """A key of the store that no other engine has, on all ranks alike. Collective."""
    return f"megarlhf/rollout/{from_first_rank(uuid.uuid4().hex)}"


class SharedCounter:
    """Hands out 0, 1, 2, ... to all ranks, each number once. It lies in the store through which the ranks have found
    each other, and costs a message to the machine of rank 0 each time."""

    def __init__(self, store: Callable[[], dist.Store], key: str) -> None:
        """`store` is asked for when the counter is first used. `key` is the same on all ranks, and nobody else's."""
        self._store, self._key, self._turn = store, key, 0

    def restart(self) -> None:
        """Begin at 0 again. Every rank does it, each at its own time: a turn has a key of its own."""
        self._turn += 1

    def next(self, count: int = 1) -> int:
        """A number, and behind it `count - 1` more."""
        return int(self._store().add(f"{self._key}/{self._turn}", count)) - count


class PromptQueue:
    """The rows of one engine, alike on all its ranks.

    It asks for a piece of the queue when vLLM has taken all of its requests into the batch and has room for more. The
    first rank of an engine takes a number from the counter; the others learn it with what the ranks agree on after a
    step (`requests.run_in_lockstep`).
    """

    def __init__(self, dealt: Deal, engine: int, counter: SharedCounter | None = None) -> None:
        """`counter`: on the first rank of an engine; None on the others."""
        self.first = dealt.first[engine]
        self._queue, self._most, self._counter = dealt.queue, dealt.most, counter
        self._largest = max(map(len, dealt.queue), default=0)
        self.is_open = bool(dealt.queue)
        """Whether there may be more in the queue."""

    def wants_more(self, unfinished: int, has_room: bool) -> bool:
        """Whether an engine with so many samples asks for a piece. It may have no more than a fair share at once, or
        the engine that begins first would get what others could do beside it."""
        return self.is_open and (not unfinished or (has_room and unfinished + self._largest <= self._most))

    def ask(self) -> int:
        """The number of the piece that is this engine's; on the ranks without the counter `NOTHING`."""
        return NOTHING if self._counter is None else self._counter.next()

    def take(self, number: int) -> Sequence[int]:
        """The rows of a piece, none where all were taken."""
        self.is_open = number < len(self._queue)
        return self._queue[number] if self.is_open else ()

    def close(self) -> None:
        """No engine gets more of the queue: this one was asked to stop."""
        if self.is_open and self._counter is not None:
            self._counter.next(len(self._queue))
        self.is_open = False
