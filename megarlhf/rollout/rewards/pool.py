"""A rank's worker processes for one user's reward function.

Each call has a limit of time. A worker that exceeds it is killed, with all that the function has started, and another
one takes its place; so is one that exits or crashes. What has failed is said in the outcome of the sample: a rank
neither hangs nor dies of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from types import MappingProxyType
from typing import Any, NamedTuple

from megarlhf.data.sources.reasoning_gym import SAME_HASHES
from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult
from megarlhf.rollout.rewards.calls import AT_ONCE
from megarlhf.rollout.rewards.forms import Form
from megarlhf.rollout.rewards.worker import END, END_SECONDS

START_SECONDS = 120.0
"""For importing the user's module."""

BACKOFF_SECONDS = (0.2, 1.0, 5.0)
"""Before the first, second, ... further try; the last for all that follow."""
LOOK_SECONDS = 0.5
"""How often a thread that waits for a worker looks whether anybody waits for it."""
_CHUNK = 4 * AT_ONCE
"""Samples that an async function is given at once."""


class Pending:
    """Outcomes that come in while the rank does other things."""

    def __init__(self, count: int) -> None:
        self._outcomes: list[RewardResult | None] = [None] * count
        self._missing = count
        self._changed = threading.Condition()
        self.seconds = 0.0
        """That workers were busy with it, added up."""

    def put(self, rows: Sequence[int], outcomes: Sequence[RewardResult], seconds: float) -> None:
        """Called by a worker's thread."""
        with self._changed:
            for row, outcome in zip(rows, outcomes, strict=True):
                self._missing -= self._outcomes[row] is None
                self._outcomes[row] = outcome
            self.seconds += seconds
            if not self._missing:  # to wake for each outcome would cost the worker's thread its turn
                self._changed.notify_all()

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> list[RewardResult] | None:
        """All outcomes, in their order; None where `should_stop` said so first."""
        with self._changed:
            while self._missing:
                if should_stop():
                    return None
                self._changed.wait(0.05)
            return [outcome for outcome in self._outcomes if outcome is not None]


class _Task(NamedTuple):
    rows: Sequence[int]
    batch: RewardBatch
    pending: Pending


class WorkerError(RuntimeError):
    """A worker that gave no answer; the message says why."""


class WorkerTimeout(WorkerError):
    """It took too long."""


class _Worker:
    """A process, its supervisor (`worker.py`) and a pipe; used by one thread: they end when that thread does."""

    def __init__(self, function: str, args: Mapping[str, Any], call_seconds: float, closed: threading.Event) -> None:
        """`closed`: set when nobody waits for an answer any more."""
        self._closed = closed
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarlhf.rollout.rewards.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=os.environ | SAME_HASHES,
                stdin=subprocess.DEVNULL,
                # Who kills the rank's process group must not kill the supervisor, which ends what the function started.
                start_new_session=True,
            )
        self._send((function, dict(args), list(sys.path), call_seconds))
        if refusal := self._receive(START_SECONDS, "to import the module"):
            self.kill()
            raise WorkerError(refusal)

    def ask(self, batch: RewardBatch, seconds: float) -> list[RewardResult]:
        """Raises: WorkerError, after which the worker is gone."""
        self._send(batch)
        outcomes: list[RewardResult] = self._receive(seconds, "")
        return outcomes

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise WorkerError(self._end()) from error

    def _receive(self, seconds: float, what: str) -> Any:
        try:
            until = time.monotonic() + seconds
            while not self._connection.poll(min(LOOK_SECONDS, max(0.0, until - time.monotonic()))):
                if self._closed.is_set():
                    self.kill()
                    raise WorkerError("was ended with the run")
                if time.monotonic() >= until:
                    self.kill()
                    raise WorkerTimeout(f"took longer than {seconds:g} s {what}".rstrip())
                if self._process.poll() is not None and not self._connection.poll():
                    raise WorkerError(self._end())  # what it has started and could not end holds the pipe open
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(self._end()) from error

    def _end(self) -> str:
        self._connection.close()
        try:
            status = self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its pipe"
        if status < 0:
            return f"ended its process by signal {-status} ({_signal_name(-status)})"
        return f"ended its process with status {status}; a function must return, not exit"

    def kill(self) -> None:
        """End the process, however it is, and what it has started."""
        self._connection.close()
        self._process.send_signal(END)
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RewardPool:
    """Workers for one function. Threads of this process wait for them."""

    def __init__(
        self,
        function: str,
        form: Form,
        *,
        args: Mapping[str, Any] = MappingProxyType({}),
        workers: int,
        timeout_seconds: float,
        retries: int = 0,
        batch_samples: int | None = None,
    ) -> None:
        """`function` is module:name, called with `args` by keyword; `timeout_seconds` is for a call; `batch_samples`
        are given at once to a function that takes several (None: all of the rank)."""
        self._function, self._args, self._form = function, args, form
        self._timeout, self._retries, self._batch_samples = timeout_seconds, retries, batch_samples
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def start(self, batch: RewardBatch) -> Pending:
        """Begin to reward a batch; nothing is waited for."""
        pending = Pending(len(batch))
        size = len(batch) if self._batch_samples is None else self._batch_samples
        if not self._form.batched:
            size = _CHUNK if self._form.waits else 1
        for start in range(0, len(batch), max(size, 1)):
            rows = range(start, min(start + size, len(batch)))
            self._tasks.put(_Task(rows, batch.part(rows), pending))
        return pending

    def close(self) -> None:
        """End the workers. What is not finished gets no outcome."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """A worker's thread."""
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None and not self._closed.is_set():
            begun = time.monotonic()
            worker, outcomes = self._answer(worker, task.batch)
            task.pending.put(task.rows, outcomes, time.monotonic() - begun)
        if worker is not None:
            worker.kill()

    def _answer(self, worker: _Worker | None, batch: RewardBatch) -> tuple[_Worker | None, list[RewardResult]]:
        """Outcomes of a batch, after as many tries as are allowed where a worker gives none."""
        failure = WorkerError("the run has ended")
        for attempt in range(self._retries + 1):
            if attempt and self._closed.wait(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS)) - 1]):
                break
            try:
                worker = worker or _Worker(self._function, self._args, self._timeout, self._closed)
                return worker, worker.ask(batch, self._limit(len(batch)))
            except WorkerError as error:
                worker, failure = None, error
            except Exception as error:  # noqa: BLE001 - such as of a system that starts no process; the thread goes on
                if worker is not None:
                    worker.kill()
                worker, failure = None, WorkerError(f"could not be called: {type(error).__name__}: {error}")
        tries = f" (tried {self._retries + 1} times)" if self._retries else ""
        return worker, [RewardResult(error=f"{failure}{tries}", late=isinstance(failure, WorkerTimeout))] * len(batch)

    def _limit(self, count: int) -> float:
        """Seconds for a call of `count` samples. Calls of an async function have their own limits in the worker; this
        one is for a function that blocks."""
        if self._form.waits:
            return self._timeout * (1 + (1 if self._form.batched else math.ceil(count / AT_ONCE)))
        return self._timeout


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "unknown"
