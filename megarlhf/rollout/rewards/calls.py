"""Calls of a user's reward function on a batch: one by one or batched, sync or async.

Only the standard library is imported, as in `batch.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

from megarlhf.own_code.failures import describe_failure, error_text, is_user_error, without_partials
from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult, WrongValue, result_of, results_of_batch
from megarlhf.rollout.rewards.forms import Form

AT_ONCE = 16
"""Concurrent calls of an async function."""
_CANCEL_SECONDS = 1.0
"""Longest wait for an async call that is cancelled."""

T = TypeVar("T")


class _Failure(NamedTuple):
    """Failure of a call, in place of its return value."""

    message: str
    late: bool = False

    def result(self) -> RewardResult:
        return RewardResult(error=self.message, late=self.late)


def call(
    function: Callable[..., Any], form: Form, batch: RewardBatch, seconds: float | None = None
) -> list[RewardResult]:
    """A result for each response of the batch. A failure is the error of its result.

    Anything that user code raises is a failure, including sys.exit; only what a signal raises goes through
    (`is_user_error`). Async calls of a process share one event loop, so that an object that they keep, such as a
    client, stays usable.

    seconds: limit for each call of an async function; other calls must be limited from outside
    """
    rows = [None] if form.batched else range(len(batch))
    calls = [partial(form.call, function, batch, n) for n in rows]
    returned = _wait_for_all(function, calls, seconds) if form.is_async else [_try(function, do) for do in calls]
    if form.batched:
        (values,) = returned
        return [values.result()] * len(batch) if isinstance(values, _Failure) else results_of_batch(values, batch)
    return [
        value.result() if isinstance(value, _Failure) else result_of(value, size)
        for value, size in zip(returned, batch.response_sizes(), strict=True)
    ]


def _try(function: Callable[..., Any], do: Callable[[], Any]) -> Any:
    """The return value of `do`, or a failure."""
    try:
        return do()
    except BaseException as error:  # noqa: BLE001 - it becomes the result's error, or is raised again
        return _failure(function, error)


def _failure(function: Callable[..., Any], error: BaseException) -> _Failure:
    """Describe an error of user code. Raises: any other error."""
    if not is_user_error(error):
        raise error
    if isinstance(error, WrongValue):
        return _Failure(str(error))
    if str(getattr(without_partials(function), "__module__", "")).startswith("megarlhf."):
        return _Failure(f"failed: {error_text(error)}")  # the line would be ours
    return _Failure(describe_failure(function, error))


def _wait_for_all(
    function: Callable[..., Any], calls: list[partial[Awaitable[Any]]], seconds: float | None
) -> list[Any]:
    """Return values of async calls, or failures. At most `AT_ONCE` calls run at the same time."""

    async def run_all() -> list[Any]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def run(do: Callable[[], Awaitable[Any]]) -> Any:
            async with slots:
                return await _wait_for(function, do, seconds)

        return list(await asyncio.gather(*map(run, calls)))

    try:
        return _loop_of_process().run(run_all())
    except BaseException as error:  # noqa: BLE001 - the function may stop the loop or cancel all tasks
        return [_failure(function, error)] * len(calls)


async def _wait_for(function: Callable[..., Any], do: Callable[[], Awaitable[Any]], seconds: float | None) -> Any:
    """Run an async call in a task of its own, because a function may cancel its task.

    asyncio.wait_for does not serve: its TimeoutError looks like one of the function's own, and it waits for as long as
    the function refuses to be cancelled.
    """

    async def in_task() -> Any:
        try:
            return await do()
        except BaseException as error:  # noqa: BLE001 - caught here, as sys.exit in a task would end the loop
            return _failure(function, error)

    task = asyncio.create_task(in_task())
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        assert seconds is not None
        task.cancel()
        await asyncio.wait({task}, timeout=min(_CANCEL_SECONDS, seconds / 10))
        return _Failure(f"took longer than {seconds:g} s", late=True)
    return _Failure("cancelled its own task") if task.cancelled() else task.result()


class _Loop:
    """An event loop that is kept between batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            try:
                return self._loop.run_until_complete(main)
            except BaseException:  # interrupted: running calls must not go on in the next batch
                loop, self._loop = self._loop, None
                _close_loop(loop)
                raise


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # another loop runs in this thread
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        loop.close()


@functools.cache
def _loop_of_process() -> _Loop:
    return _Loop()
