"""A rank's worker processes for one user's reward function.

Each call has a time limit. A worker that exceeds it is killed, together with every process that the function started,
and replaced. A worker that exits or crashes is replaced too. The failure becomes the result of the sample, so the rank
neither hangs nor dies.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult
from megarlhf.rollout.rewards.calls import AT_ONCE
from megarlhf.rollout.rewards.forms import Form
from megarlhf.rollout.workers.process import WorkerError, WorkerProcess, WorkerTimeout

BACKOFF_SECONDS = (0.2, 1.0, 5.0)
"""Pause before the first, second and every later retry."""
_MODULE = "megarlhf.rollout.rewards.worker"
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

    @property
    def done(self) -> int:
        """Number of results that are there."""
        return len(self._results) - self._missing

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
        worker: WorkerProcess | None = None
        while (task := self._tasks.get()) is not None and not self._closed.is_set():
            begun = time.monotonic()
            worker, results = self._answer(worker, task.batch)
            task.pending.put(task.rows, results, time.monotonic() - begun)
        if worker is not None:
            worker.kill()

    def _answer(
        self, worker: WorkerProcess | None, batch: RewardBatch
    ) -> tuple[WorkerProcess | None, list[RewardResult]]:
        """Results of a batch. The call is retried if a worker gives no answer."""
        first = (self._function, dict(self._args), list(sys.path), self._timeout)
        failure = WorkerError("the run has ended")
        for attempt in range(self._retries + 1):
            if attempt and self._closed.wait(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS)) - 1]):
                break
            try:
                worker = worker or WorkerProcess(_MODULE, first, self._closed)
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
