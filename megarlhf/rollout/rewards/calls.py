"""Calling a user's reward function on a batch: one by one or at once, waiting for it or not.

The standard library only, as `batch.py`.
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
    described,
    is_users,
    outcome_of,
    outcomes_of_batch,
    text_of,
)
from megarlhf.rollout.rewards.forms import Form, without_partials

AT_ONCE = 16
"""Calls of an async function that wait at the same time."""
_LEAVE_SECONDS = 1.0
"""For an async call that is cancelled, at most."""
_SHOWN_OF_LINE = 200
"""Characters of a line of source in a message."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of packages."""
_BETWEEN = frozenset({__file__, forms.__file__})
"""Files through which a call goes to the user's function."""

T = TypeVar("T")


class _Failure(NamedTuple):
    """In place of what a call returns."""

    words: str
    late: bool = False

    def outcome(self) -> RewardResult:
        return RewardResult(error=self.words, late=self.late)


def load_function(name: str) -> Callable[..., Any]:
    """The function that `package.module:name` names. Raises: ValueError, which says what is wrong."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
    except ImportError as error:
        raise ValueError(
            f"reward rule {name!r}: cannot import {module_name}: {text_of(error)}; set PYTHONPATH"
        ) from error
    except BaseException as error:
        if not is_users(error):
            raise
        hint = ""
        if isinstance(error, SystemExit):
            hint = "; what a command line calls belongs under `if __name__ == '__main__':`"
        line = None if isinstance(error, SyntaxError) else _line_of(None, error)  # which says where by itself
        where = f" ({line.filename}:{line.lineno})" if line else ""
        raise ValueError(
            f"reward rule {name!r}: {module_name} fails when it is imported: {described(error)}{where}{hint}"
        ) from error
    if not callable(function):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        near = difflib.get_close_matches(function_name, known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward rule {name!r}: {_place_of(module)} has no function {function_name!r}{meant}")
    return function


def _place_of(module: ModuleType) -> str:
    """Its file, where it has one."""
    if file := getattr(module, "__file__", None):
        return str(file)
    if folders := list(getattr(module, "__path__", [])):
        return f"{folders[0]} is a folder without __init__.py, which"
    return f"the module {module.__name__}, which is built into Python,"


def call(
    function: Callable[..., Any], form: Form, batch: RewardBatch, seconds: float | None = None
) -> list[RewardResult]:
    """An outcome for each response of the batch; what fails is said in its outcome.

    Also what is no `Exception`, such as a call of sys.exit, is a failure; only what a signal raises goes through
    (`is_users`). Async calls of a process share one event loop, so that what they keep, such as a client, stays good.

    `seconds`: for each call of an async function; others have to be watched from outside.
    """
    rows = [None] if form.batched else range(len(batch))
    gets = [partial(form.call, function, batch, n) for n in rows]
    returned = _wait_for_all(function, gets, seconds) if form.waits else [_try(function, get) for get in gets]
    if form.batched:
        (one,) = returned
        return [one.outcome()] * len(batch) if isinstance(one, _Failure) else outcomes_of_batch(one, batch)
    return [
        each.outcome() if isinstance(each, _Failure) else outcome_of(each, size)
        for each, size in zip(returned, batch.response_sizes(), strict=True)
    ]


def _try(function: Callable[..., Any], get: Callable[[], Any]) -> Any:
    """What `get` returns, or a failure."""
    try:
        return get()
    except BaseException as error:  # noqa: BLE001 - it is said in the outcome, or raised again
        return _failure(function, error)


def _failure(function: Callable[..., Any], error: BaseException) -> _Failure:
    """Raises: what is no failure of the user's."""
    if not is_users(error):
        raise error
    if isinstance(error, WrongValue):
        return _Failure(str(error))
    if str(getattr(without_partials(function), "__module__", "")).startswith("megarlhf."):
        return _Failure(f"failed: {text_of(error)}")  # the message says all; the line would be ours
    hint = "; a function must return, not exit" if isinstance(error, SystemExit) else ""
    line = _line_of(_file_of(function), error)
    if line is not None:
        place = f"; {line.filename}:{line.lineno}: {cut(line.line or '', _SHOWN_OF_LINE)}"
    else:
        place = "; it takes other arguments" if isinstance(error, TypeError) else ""
    return _Failure(f"raised {described(error)}{hint}{place}")


def _wait_for_all(
    function: Callable[..., Any], gets: list[partial[Awaitable[Any]]], seconds: float | None
) -> list[Any]:
    """What async calls return, or failures; `AT_ONCE` of them wait at the same time."""

    async def all_of_them() -> list[Any]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(get: Callable[[], Awaitable[Any]]) -> Any:
            async with slots:
                return await _wait_for(function, get, seconds)

        return list(await asyncio.gather(*map(one, gets)))

    try:
        return _loop_of_process().run(all_of_them())
    except BaseException as error:  # noqa: BLE001 - such as of a function that stops the loop, or cancels all tasks
        return [_failure(function, error)] * len(gets)


async def _wait_for(function: Callable[..., Any], get: Callable[[], Awaitable[Any]], seconds: float | None) -> Any:
    """In a task of its own: a function may cancel the one that it runs in. Not asyncio.wait_for, from which a
    TimeoutError may be the function's own, and which waits for as long as it refuses to be cancelled."""

    async def in_task() -> Any:
        try:
            return await get()
        except BaseException as error:  # noqa: BLE001 - here, since sys.exit in a task would end the loop
            return _failure(function, error)

    task = asyncio.create_task(in_task())
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        assert seconds is not None
        task.cancel()
        await asyncio.wait({task}, timeout=min(_LEAVE_SECONDS, seconds / 10))
        return _Failure(f"took longer than {seconds:g} s", late=True)
    return _Failure("cancelled its own task") if task.cancelled() else task.result()


class _Loop:
    """An event loop that stays between batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            try:
                return self._loop.run_until_complete(main)
            except BaseException:  # interrupted: what is under way must not go on in the next batch
                loop, self._loop = self._loop, None
                _end(loop)
                raise


def _end(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # another loop runs in this thread
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=_LEAVE_SECONDS))
        loop.close()


@functools.cache
def _loop_of_process() -> _Loop:
    return _Loop()


def _file_of(function: Callable[..., Any]) -> str | None:
    """Where the user's function stands, below partials and decorators, or the `__call__` of his object."""
    try:
        found: Any = inspect.unwrap(without_partials(function))
        if not inspect.isroutine(found) and not inspect.isclass(found) and not isinstance(found, partial):
            found = inspect.unwrap(without_partials(type(found).__call__))
        return without_partials(found).__code__.co_filename
    except Exception:  # noqa: BLE001 - an object may raise anything for an attribute; then no file is known
        return None


def _line_of(file: str | None, error: BaseException) -> traceback.FrameSummary | None:
    """The last line on the way to the error that is the user's: in `file`, else in any that is neither Python's nor an
    installed package's; where there is none, a package's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _BETWEEN]
    own = [frame for frame in frames if frame.filename == file]
    others = [frame for frame in frames if not _is_pythons(frame.filename)]
    users = [frame for frame in others if not _INSTALLED & set(Path(frame.filename).parts)]
    own_users = [frame for frame in own if frame in users]
    return next((chosen[-1] for chosen in (own_users, users, own, others) if chosen), None)


def _is_pythons(file: str) -> bool:
    """Of the standard library; packages may be installed below it."""
    path = Path(file)
    is_below = not _python_folders().isdisjoint(path.parents) and not _INSTALLED & set(path.parts)
    return is_below or file.startswith("<frozen ")


@functools.cache
def _python_folders() -> frozenset[Path]:
    return frozenset(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))
