"""A rank's worker processes for one user's reward function.

Each call has a time limit. A worker that exceeds it is killed, together with every process that the function started,
and replaced. A worker that exits or crashes is replaced too. The failure becomes the result of the sample, so the rank
neither hangs nor dies.

pebble.ProcessPool does less: it kills the worker but not what the function started, a busy worker outlives a killed
rank, SIGTERM to a job ends its workers, and a forked child of a function can answer on the pipe that workers share.
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
"""Time limit for importing the user's module."""

BACKOFF_SECONDS = (0.2, 1.0, 5.0)
"""Pause before the first, second and every later retry."""
POLL_SECONDS = 0.5
"""Interval at which a waiting thread checks whether the pool was closed."""
_CHUNK = 4 * AT_ONCE
"""Samples in one task of an async function."""


class Pending:
    """Results of a batch. Worker threads add them while the rank does other things."""

    def __init__(self, count: int) -> None:
        self._results: list[RewardResult | None] = [None] * count
        self._missing = count
        self._changed = threading.Condition()
        self.seconds = 0.0
        """Busy time of all workers, added up."""

    def put(self, rows: Sequence[int], results: Sequence[RewardResult], seconds: float) -> None:
        with self._changed:
            for row, result in zip(rows, results, strict=True):
                self._missing -= self._results[row] is None
                self._results[row] = result
            self.seconds += seconds
            if not self._missing:  # waking the rank for every result would slow the worker threads down
                self._changed.notify_all()

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> list[RewardResult] | None:
        """All results in the order of the batch; None if `should_stop` returned true first."""
        with self._changed:
            while self._missing:
                if should_stop():
                    return None
                self._changed.wait(0.05)
            return [result for result in self._results if result is not None]


class _Task(NamedTuple):
    rows: Sequence[int]
    batch: RewardBatch
    pending: Pending


class WorkerError(RuntimeError):
    """No answer from a worker. The message says why."""


class WorkerTimeout(WorkerError):
    """No answer within the time limit."""


class _Worker:
    """A process with its supervisor (`worker.py`) and a pipe to it. Used by one thread, and ends with that thread."""

    def __init__(self, function: str, args: Mapping[str, Any], call_seconds: float, closed: threading.Event) -> None:
        """`closed`: set when the pool is closed and no answer is needed."""
        self._closed = closed
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarlhf.rollout.rewards.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=os.environ | SAME_HASHES,
                stdin=subprocess.DEVNULL,
                # The supervisor ends what the function started: it must outlive a kill of the rank's process group.
                start_new_session=True,
            )
        self._send((function, dict(args), list(sys.path), call_seconds))
        if refusal := self._receive(START_SECONDS, " to import the module"):
            self.kill()
            raise WorkerError(refusal)

    def ask(self, batch: RewardBatch, seconds: float) -> list[RewardResult]:
        """Raises: WorkerError, after which the worker is gone."""
        self._send(batch)
        results: list[RewardResult] = self._receive(seconds)
        return results

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise WorkerError(self._end()) from error

    def _receive(self, seconds: float, purpose: str = "") -> Any:
        try:
            until = time.monotonic() + seconds
            while not self._connection.poll(min(POLL_SECONDS, max(0.0, until - time.monotonic()))):
                if self._closed.is_set():
                    self.kill()
                    raise WorkerError("was ended with the run")
                if time.monotonic() >= until:
                    self.kill()
                    raise WorkerTimeout(f"took longer than {seconds:g} s{purpose}")
                if self._process.poll() is not None and not self._connection.poll():
                    raise WorkerError(self._end())  # a process that could not be ended still holds the pipe open
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(self._end()) from error

    def _end(self) -> str:
        """Wait for the end of the process. Returns how it ended."""
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
        """End the process and everything that it started, whatever state it is in."""
        self._connection.close()
        self._process.send_signal(END)
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RewardPool:
    """Workers for one function. Each worker is served by a thread of this process."""

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
        """
        function: `package.module:name`, called with `args` by keyword
        timeout_seconds: limit of one call
        batch_samples: samples in one call of a function that takes a batch (None: all of the rank)
        """
        self._function, self._args, self._form = function, args, form
        self._timeout, self._retries, self._batch_samples = timeout_seconds, retries, batch_samples
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def start(self, batch: RewardBatch) -> Pending:
        """Begin to reward a batch, without waiting."""
        pending = Pending(len(batch))
        unbatched_size = _CHUNK if self._form.is_async else 1
        size = self._batch_samples if self._form.batched else unbatched_size
        for rows in batch.row_ranges(size):
            self._tasks.put(_Task(rows, batch.part(rows), pending))
        return pending

    def close(self) -> None:
        """End the workers. Unfinished samples get no result."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Loop of a worker's thread."""
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None and not self._closed.is_set():
            begun = time.monotonic()
            worker, results = self._answer(worker, task.batch)
            task.pending.put(task.rows, results, time.monotonic() - begun)
        if worker is not None:
            worker.kill()

    def _answer(self, worker: _Worker | None, batch: RewardBatch) -> tuple[_Worker | None, list[RewardResult]]:
        """Results of a batch. The call is retried if a worker gives no answer."""
        failure = WorkerError("the run has ended")
        for attempt in range(self._retries + 1):
            if attempt and self._closed.wait(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS)) - 1]):
                break
            try:
                worker = worker or _Worker(self._function, self._args, self._timeout, self._closed)
                return worker, worker.ask(batch, self._limit(len(batch)))
            except WorkerError as error:
                worker, failure = None, error
            except Exception as error:  # noqa: BLE001 - the system may start no process, say; the thread must go on
                if worker is not None:
                    worker.kill()
                worker, failure = None, WorkerError(f"could not be called: {type(error).__name__}: {error}")
        tries = f" (tried {self._retries + 1} times)" if self._retries else ""
        return worker, [RewardResult(error=f"{failure}{tries}", late=isinstance(failure, WorkerTimeout))] * len(batch)

    def _limit(self, count: int) -> float:
        """Seconds for a call of `count` samples. The worker itself limits each call of an async function: this larger
        limit is only for an async function that blocks."""
        if self._form.is_async:
            return self._timeout * (1 + (1 if self._form.batched else math.ceil(count / AT_ONCE)))
        return self._timeout


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "unknown"
