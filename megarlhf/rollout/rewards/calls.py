"""Calling a user's reward function on a batch: one by one or at once, waiting for it or not.

The standard library only, as `batch.py`.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from megarlhf.rollout.rewards.batch import Outcome, RewardBatch, outcomes_of_batch

LATE = "took longer than"
AT_ONCE = 16
"""Calls of an async function that wait at the same time."""


class Form(NamedTuple):
    """How a function wants to be called."""

    batched: bool
    """With a `RewardBatch`; else with (prompt, response, fields), one by one."""
    waits: bool
    """It is async."""


def form_of(function: Callable[..., Any]) -> Form:
    """From its signature: one argument that has to be given is a `RewardBatch`, three are (prompt, response, fields).

    Raises: ValueError for any other number, or for an async generator.
    """
    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise ValueError("it is a generator; return the values instead of yielding them")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a builtin without a signature
        return Form(batched=False, waits=False)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    waits = inspect.iscoroutinefunction(target)
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise ValueError("it has a keyword-only argument without a default; give that one a default")
    if len(needed) == 1:
        return Form(batched=True, waits=waits)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) <= 3 and (len(positional) >= 3 or open_ended):
        return Form(batched=False, waits=waits)
    raise ValueError(
        f"it takes {len(needed)} arguments that have to be given; expected three (prompt, response, fields) for one "
        "response, or one, a RewardBatch, for several"
    )


def load_function(name: str) -> Callable[..., Any]:
    """The function that `package.module:name` names. Raises: ValueError, which says what is wrong."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward rule {name!r}: cannot import {module_name}: {error}; set PYTHONPATH") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"reward rule {name!r}: {module_name} fails when it is imported: {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        near = difflib.get_close_matches(function_name, known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward rule {name!r}: {module.__file__} has no function {function_name!r}{meant}")
    return function


def call(function: Callable[..., Any], form: Form, batch: RewardBatch, seconds: float | None = None) -> list[Outcome]:
    """An outcome for each response of the batch; what fails is said in its outcome.

    `seconds`: for each call of an async function; others have to be watched from outside.
    """
    if form.waits:
        return asyncio.run(_call_waiting(function, form, batch, seconds))
    if form.batched:
        return _of_batch(batch, *_try(function, lambda: function(batch)))
    return [_of_one(batch, n, *_try(function, partial(function, *_three(batch, n)))) for n in range(len(batch))]


async def _call_waiting(
    function: Callable[..., Any], form: Form, batch: RewardBatch, seconds: float | None
) -> list[Outcome]:
    if form.batched:
        return _of_batch(batch, *await _try_waiting(function, lambda: function(batch), seconds))
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(n: int) -> Outcome:
        async with slots:
            return _of_one(batch, n, *await _try_waiting(function, partial(function, *_three(batch, n)), seconds))

    return list(await asyncio.gather(*(one(n) for n in range(len(batch)))))


def _three(batch: RewardBatch, n: int) -> tuple[str, str, Any]:
    return batch.prompts[n], batch.responses[n], batch.fields[n]


def _try(function: Callable[..., Any], get: Callable[[], Any]) -> tuple[Any, str]:
    """What `get` returns, and what went wrong, in words."""
    try:
        return get(), ""
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it is said in the outcome
        return None, _words(function, error)


async def _try_waiting(
    function: Callable[..., Any], get: Callable[[], Awaitable[Any]], seconds: float | None
) -> tuple[Any, str]:
    try:
        return await asyncio.wait_for(get(), seconds), ""
    except Exception as error:  # noqa: BLE001 - as above
        timed_out = isinstance(error, TimeoutError) and not error.args
        return None, f"{LATE} {seconds:g} s" if timed_out and seconds else _words(function, error)


def _words(function: Callable[..., Any], error: Exception) -> str:
    while isinstance(function, partial):
        function = function.func
    if str(getattr(function, "__module__", "")).startswith("megarlhf."):  # the message says all; the line would be ours
        return f"failed: {error}"
    return f"raised {type(error).__name__}: {error}; {line_of(function, error.__traceback__)}"


def _of_one(batch: RewardBatch, n: int, returned: Any, error: str) -> Outcome:
    if error:
        return Outcome(error=error, late=error.startswith(LATE))
    try:
        return Outcome.of(returned, len(batch.response_tokens[n]))
    except ValueError as problem:
        return Outcome(error=str(problem))


def _of_batch(batch: RewardBatch, returned: Any, error: str) -> list[Outcome]:
    if error:
        return [Outcome(error=error, late=error.startswith(LATE))] * len(batch)
    try:
        return outcomes_of_batch(returned, batch)
    except ValueError as problem:
        return [Outcome(error=str(problem))] * len(batch)


def line_of(function: Callable[..., Any], trace: TracebackType | None) -> str:
    """The last line of the function's own file on the way to the error; of any file where none is the function's."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename != __file__]
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    last = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    return "it takes other arguments" if last is None else f"{last.filename}:{last.lineno}: {last.line}"
