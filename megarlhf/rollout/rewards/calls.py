"""Calls of a user's reward function on a batch: one by one or batched, sync or async.

Only the standard library is imported, as in `batch.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import importlib
import inspect
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from megarlhf.rollout.rewards import forms
from megarlhf.rollout.rewards.batch import (
    RewardBatch,
    RewardResult,
    WrongValue,
    cut,
    describe_error,
    error_text,
    is_user_error,
    result_of,
    results_of_batch,
)
from megarlhf.rollout.rewards.forms import Form, without_partials

AT_ONCE = 16
"""Concurrent calls of an async function."""
_CANCEL_SECONDS = 1.0
"""Longest wait for an async call that is cancelled."""
_MAX_LINE_LENGTH = 200
"""Characters of a line of source in a message."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""
_CALLERS = frozenset({__file__, forms.__file__})
"""Files of ours between a call and the user's function."""

T = TypeVar("T")


class _Failure(NamedTuple):
    """Failure of a call, in place of its return value."""

    message: str
    late: bool = False

    def result(self) -> RewardResult:
        return RewardResult(error=self.message, late=self.late)


def load_function(name: str) -> Callable[..., Any]:
    """Import the function `package.module:name`. Raises: ValueError if that fails."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
    except ImportError as error:
        raise ValueError(
            f"reward rule {name!r}: cannot import {module_name}: {error_text(error)}; set PYTHONPATH"
        ) from error
    except BaseException as error:
        if not is_user_error(error):
            raise
        hint = ""
        if isinstance(error, SystemExit):
            hint = "; what a command line calls belongs under `if __name__ == '__main__':`"
        line = None if isinstance(error, SyntaxError) else _line_of(None, error)  # a SyntaxError names its own place
        where = f" ({line.filename}:{line.lineno})" if line else ""
        raise ValueError(
            f"reward rule {name!r}: {module_name} fails when it is imported: {describe_error(error)}{where}{hint}"
        ) from error
    if not callable(function):
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        near = difflib.get_close_matches(function_name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward rule {name!r}: {_describe_module(module)} has no function {function_name!r}{hint}")
    return function


def _describe_module(module: ModuleType) -> str:
    if file := getattr(module, "__file__", None):
        return str(file)
    if folders := list(getattr(module, "__path__", [])):
        return f"{folders[0]} is a folder without __init__.py, which"
    return f"the module {module.__name__}, which is built into Python,"


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
    hint = "; a function must return, not exit" if isinstance(error, SystemExit) else ""
    line = _line_of(_file_of(function), error)
    if line is not None:
        where = f"; {line.filename}:{line.lineno}: {cut(line.line or '', _MAX_LINE_LENGTH)}"
    else:
        where = "; it takes other arguments" if isinstance(error, TypeError) else ""
    return _Failure(f"raised {describe_error(error)}{hint}{where}")


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


def _file_of(function: Callable[..., Any]) -> str | None:
    """File of the user's function below partials and decorators, or of the `__call__` of an object."""
    try:
        target: Any = inspect.unwrap(without_partials(function))
        if not inspect.isroutine(target) and not inspect.isclass(target) and not isinstance(target, partial):
            target = inspect.unwrap(without_partials(type(target).__call__))
        return without_partials(target).__code__.co_filename
    except Exception:  # noqa: BLE001 - an object may raise anything for an attribute; then the file is unknown
        return None


def _line_of(file: str | None, error: BaseException) -> traceback.FrameSummary | None:
    """The last line of user code in the traceback: in `file`, else in any file that belongs neither to Python nor to an
    installed package. Without such a line, the last line of a package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _CALLERS]
    own = [frame for frame in frames if frame.filename == file]
    others = [frame for frame in frames if not _is_standard_library(frame.filename)]
    users = [frame for frame in others if not _INSTALLED & set(Path(frame.filename).parts)]
    own_users = [frame for frame in own if frame in users]
    return next((chosen[-1] for chosen in (own_users, users, own, others) if chosen), None)


def _is_standard_library(file: str) -> bool:
    path = Path(file)  # packages may be installed below the standard library
    is_below = not _python_folders().isdisjoint(path.parents) and not _INSTALLED & set(path.parts)
    return is_below or file.startswith("<frozen ")


@functools.cache
def _python_folders() -> frozenset[Path]:
    return frozenset(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))
