"""Calls of users' environments in a worker: whose code runs, its random numbers, and the time limit of async calls.

A method that is not async is called while the event loop stands still, so that it may use one of its own
(`asyncio.run`). Only the standard library is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from megarlhf.own_code.failures import describe_failure
from megarlhf.rollout.environments.answer import WrongAnswer
from megarlhf.rollout.environments.protocol import RunningCode
from megarlhf.rollout.environments.random_state import RandomState

_CANCEL_SECONDS = 1.0
"""Longest wait for an async call that is cancelled."""


class CallError(Exception):
    """Failure of a call, in words for the user."""

    def __init__(self, message: str, *, late: bool = False, drifted: bool = False) -> None:
        super().__init__(message)
        self.late, self.drifted = late, drifted


class CodeOwner:
    """The conversation to which running code belongs."""

    def __init__(self, key: int, seed: int) -> None:
        self.key = key
        self.random = RandomState(seed)
        self.seconds = 0.0
        """Time that its code has had the process."""
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """Tasks that its calls and its own code have made."""
        self.outside: Callable[[Callable[[], Any]], Awaitable[_Outcome]]
        """Calls a function while the event loop stands still. Set with the first call of its code."""


_owner: contextvars.ContextVar[CodeOwner | None] = contextvars.ContextVar("_owner", default=None)
"""Owner of the code that runs in a context. Tasks, and the tasks that they make, inherit it."""


class _Outcome(NamedTuple):
    """Return value of user code, or what it raised. An exception would end the loop, if it were SystemExit."""

    value: Any = None
    error: BaseException | None = None


class _OutsideCall(NamedTuple):
    """A call that waits until the event loop stands still."""

    owner: CodeOwner
    function: Callable[[], Any]
    outcome: asyncio.Future[_Outcome]


async def outside_loop(function: Callable[[], Any]) -> Any:
    """Call a function while the event loop stands still, as a method that is not async. For code that runs in a call;
    elsewhere the function is called at once. Raises: what the function raises."""
    if (owner := _owner.get()) is None:
        return function()
    outcome = await owner.outside(function)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class UserCode:
    """The event loop of a worker, and the calls of user code in it and outside it."""

    def __init__(self, running: RunningCode, seconds: float) -> None:
        """seconds: time limit of an async call. The rank limits what blocks the process."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._new_task)
        self._running, self._seconds, self._process = running, seconds, os.getpid()
        self._outside: deque[_OutsideCall] = deque()
        self._entered, self._user_seconds = 0.0, 0.0
        self._ended = False

    def run(self) -> None:
        """Run the loop and the calls outside it until `stop`."""
        while not self._ended:
            if self._outside:
                self._call_next()
                self.loop.stop()  # one turn of the loop, then the next call
            # These are raised by tasks that the user's code has made. What awaits such a task gets them too.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def stop(self) -> None:
        """Let `run` return."""
        self._ended = True
        self.loop.set_exception_handler(lambda loop, context: None)  # unfinished tasks are no news
        self.loop.stop()

    async def call(self, owner: CodeOwner, function: Callable[..., Any], *args: Any) -> Any:
        """Call user code, sync or async. Raises: CallError for whatever it raises, and if it takes too long."""
        owner.outside = partial(self._outside_loop, owner)
        try:
            if inspect.iscoroutinefunction(function):
                outcome = _Outcome(function(*args))
            else:
                outcome = await self._outside_loop(owner, partial(function, *args))
            if outcome.error is None and inspect.isawaitable(outcome.value):
                outcome = await self._limited(owner, outcome.value)
        except asyncio.CancelledError:  # not of the call's own task, which hands over what it raises
            raise CallError("was cancelled: an environment has cancelled all tasks of its process") from None
        except Exception as error:  # noqa: BLE001 - a decorator of the user's may raise anything
            outcome = _Outcome(error=error)
        if isinstance(outcome.error, CallError):
            raise outcome.error
        if outcome.error is not None:
            raise CallError(describe_failure(function, outcome.error))
        return outcome.value

    def read(self, owner: CodeOwner, read: Callable[[Any], Any], value: Any) -> Any:
        """`read(value)`, where `value` is the user's and may run code when it is read. Raises: CallError."""
        self.enter(owner)
        try:
            return read(value)
        except WrongAnswer as error:
            raise CallError(str(error)) from None
        except BaseException as error:  # noqa: BLE001 - the value may raise anything
            raise CallError(describe_failure(read, error)) from None
        finally:
            self.leave(owner)

    async def end_tasks(self, owner: CodeOwner) -> None:
        """Cancel what runs of a conversation."""
        if tasks := [task for task in owner.tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    # --- whose code runs --------------------------------------------------------------------------

    def enter(self, owner: CodeOwner) -> None:
        owner.random.load()
        self._entered = time.monotonic()
        self._running.enter(owner.key)

    def leave(self, owner: CodeOwner) -> None:
        if os.getpid() != self._process:
            os._exit(0)  # a forked child that has returned where it should have ended
        seconds = time.monotonic() - self._entered
        self._user_seconds += seconds
        owner.seconds += seconds
        self._running.leave()
        owner.random.save()

    # --- outside the loop -------------------------------------------------------------------------

    async def _outside_loop(self, owner: CodeOwner, function: Callable[[], Any]) -> _Outcome:
        future: asyncio.Future[_Outcome] = self.loop.create_future()
        self._outside.append(_OutsideCall(owner, function, future))
        self.loop.stop()
        return await future

    def _call_next(self) -> None:
        call = self._outside.popleft()
        if call.outcome.done():  # cancelled
            return
        self.enter(call.owner)
        try:
            outcome = _Outcome(_context_of(call.owner).run(call.function))
        except BaseException as error:  # noqa: BLE001 - it becomes the call's error
            outcome = _Outcome(error=error)
        finally:
            self.leave(call.owner)
        call.outcome.set_result(outcome)

    # --- in the loop ------------------------------------------------------------------------------

    async def _limited(self, owner: CodeOwner, awaitable: Awaitable[Any]) -> _Outcome:
        """Await in a task of its own, because user code may cancel its task. Time in which other conversations' code
        has the process does not count.

        asyncio.wait_for does not serve: its TimeoutError looks like one of the user's own, and it waits for as long as
        the user's code refuses to be cancelled.
        """
        task = _context_of(owner).run(self.loop.create_task, _outcome(awaitable))
        begun, others = time.monotonic(), self._user_seconds - owner.seconds
        while not task.done():
            waited_for_others = self._user_seconds - owner.seconds - others
            left = self._seconds - (time.monotonic() - begun - waited_for_others)
            if left <= 0:
                task.cancel()
                await asyncio.wait({task}, timeout=min(_CANCEL_SECONDS, self._seconds / 10))
                return _Outcome(error=CallError(f"took longer than {self._seconds:g} s", late=True))
            await asyncio.wait({task}, timeout=left)
        if task.cancelled():
            return _Outcome(error=CallError("cancelled its own task"))
        return task.result()

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, /, **options: Any) -> asyncio.Task[Any]:
        """A task; one that a conversation's code makes belongs to that conversation."""
        if (owner := _owner.get()) is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = asyncio.Task(_OwnedCoroutine(self, owner, coroutine), loop=loop, **options)
        owner.tasks.add(task)
        return task


def _context_of(owner: CodeOwner) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(_owner.set, owner)
    return context


async def _outcome(awaitable: Awaitable[Any]) -> _Outcome:
    try:
        return _Outcome(await awaitable)
    except BaseException as error:  # noqa: BLE001 - it becomes the call's error
        return _Outcome(error=error)


class _OwnedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine between whose suspensions its owner's code runs."""

    def __init__(self, code: UserCode, owner: CodeOwner, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._code, self._owner, self._coroutine = code, owner, coroutine
        self.__name__ = self.__qualname__ = getattr(coroutine, "__qualname__", type(coroutine).__name__)  # for logs

    def send(self, value: Any) -> Any:
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._run(self._coroutine.close)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        self._code.enter(self._owner)
        try:
            return function(*args)
        finally:
            self._code.leave(self._owner)

    def __await__(self) -> Any:
        """Values of the coroutine's suspensions. A task uses `send` and `throw` instead."""
        return (yield from self._coroutine.__await__())
