"""A rank's environments in worker processes, which it asks without waiting.

Many conversations share a process, and each stays with its process. User code may raise, hang, exit or crash: only its
own conversation fails. The others of a process that is gone are repeated in a new one, turn by turn, as their answers
are recorded here; the caller does not notice.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from megarlhf.own_code.failures import describe_error
from megarlhf.rollout.environments.answer import Turn
from megarlhf.rollout.environments.protocol import AnsweredCall
from megarlhf.rollout.environments.worker_thread import Reply, WorkerThread
from megarlhf.rollout.tools.start import ToolsStart


class EnvironmentPool:
    """Conversations with a user's environment. No method waits, except `wait` and `close`.

    Each `begin` and each `step` gets one reply. A conversation takes one `step` at a time. After a reply with an error
    it takes none.
    """

    _keys = itertools.count(1)

    def __init__(
        self,
        function: str,
        args: Mapping[str, Any],
        *,
        workers: int,
        seconds_per_step: float,
        interface: str = "megarlhf",
        python: str | None = None,
        tools: ToolsStart | None = None,
    ) -> None:
        """
        function: `package.module:Class`, see `answer.py`
        args: arguments of the class, by keyword
        workers: processes; each starts with its first conversation
        seconds_per_step: time limit of each call of `reset`, `step` and `close`
        interface: `megarlhf`, see `answer.py`, or `gymnasium`, see `gymnasium_adapter.py`
        python: interpreter of the processes; None: that of this process
        tools: in place of a class
        """
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._replies: deque[Reply] = deque()
        self._worker_of: dict[int, WorkerThread] = {}
        """Workers of the conversations that are neither forgotten nor failed."""
        self._num_conversations: Counter[WorkerThread] = Counter()
        self._waiting: set[int] = set()
        """Conversations whose reply the caller does not have yet."""
        self._workers = [
            WorkerThread(function, args, seconds_per_step, self._put, self._closed, interface, python, tools)
            for _ in range(workers)
        ]

    def begin(self, fields: Mapping[str, Any], seed: int, history: Sequence[AnsweredCall] = ()) -> int:
        """Begin a conversation. Returns its key, which no other conversation of this process ever has.

        fields, seed: what `reset` gets
        history: calls and answers that were recorded earlier, the beginning first. They are repeated; the reply is the
            last recorded answer, or says that the environment has drifted.
        """
        assert not history or history[0].turn is None, "a history begins with the answer of `reset`"
        key = next(self._keys)
        with self._changed:
            worker = min(self._workers, key=lambda worker: self._num_conversations[worker])
            self._worker_of[key] = worker
            self._num_conversations[worker] += 1
            self._waiting.add(key)
        try:
            content = pickle.dumps(dict(fields))
        except Exception as error:  # noqa: BLE001 - an object may raise anything
            self._put(Reply(key, None, f"cannot be given its fields: {describe_error(error)}"))
        else:
            worker.begin(key, content, seed, history)
        return key

    def step(self, key: int, turn: Turn) -> None:
        """Ask a conversation for its answer to a turn."""
        with self._changed:
            assert key in self._worker_of, f"conversation {key} has failed, is forgotten, or never began"
            assert key not in self._waiting, f"conversation {key} has not answered yet"
            self._waiting.add(key)
            worker = self._worker_of[key]
        worker.step(key, turn)

    def forget(self, key: int) -> None:
        """End a conversation, which may have failed. Its object is closed."""
        with self._changed:
            if (worker := self._remove(key)) is None:
                return
            if key in self._waiting:
                self._waiting.discard(key)
                self._replies = deque(reply for reply in self._replies if reply.key != key)
        worker.forget(key)

    def replies(self) -> list[Reply]:
        """Replies that have come since the last call."""
        with self._changed:
            replies = list(self._replies)
            self._replies.clear()
            for reply in replies:
                self._waiting.discard(reply.key)
                if reply.answer is None:
                    self._remove(reply.key)
        return replies

    def wait(self, seconds: float) -> None:
        """Wait until there is a reply, but no longer than `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._replies), seconds)

    @property
    def busy_seconds(self) -> float:
        """Time in which workers had calls to answer, added up over them."""
        return sum(worker.busy_seconds for worker in self._workers)

    def close(self) -> None:
        """Close the objects of all conversations, then end all processes, also those that hang."""
        if self._closed.is_set():
            return
        self._closed.set()
        for worker in self._workers:
            worker.wake()
        for worker in self._workers:
            worker.join()

    def _remove(self, key: int) -> WorkerThread | None:
        """Remove a conversation. Returns its worker; None if it is removed already."""
        if (worker := self._worker_of.pop(key, None)) is not None:
            self._num_conversations[worker] -= 1
        return worker

    def _put(self, reply: Reply) -> None:
        """Add a reply, in the thread of a worker. That of a forgotten conversation is dropped."""
        with self._changed:
            if reply.key in self._worker_of:
                self._replies.append(reply)
                self._changed.notify_all()
