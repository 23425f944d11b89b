"""The tools of a worker process: started once, called by its conversations.

Only the standard library is imported at the top: packages that a tool needs are imported when it is started.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from megarlhf.own_code.failures import describe_error, short
from megarlhf.own_code.load import load_function
from megarlhf.rollout.environments.user_code import outside_loop
from megarlhf.rollout.tools.arguments import ArgumentCheck
from megarlhf.rollout.tools.call import Call, ToolError
from megarlhf.rollout.tools.start import ToolsStart

_CANCEL_SECONDS = 1.0
"""Longest wait for a cancelled call."""


class _Source(Protocol):
    """Executor of the calls of some tools."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Text of the result. Raises: ToolError."""
        ...

    def close(self) -> None: ...


class ToolBox:
    """Tools by name."""

    def __init__(self, start: ToolsStart) -> None:
        """Raises: ValueError for a tool that cannot be started, or that is described otherwise than to the model."""
        self._sources: list[_Source] = []
        self._tools: dict[str, tuple[_Source, ArgumentCheck]] = {}
        self._closed = False
        try:
            for part in start.sources:
                source = _started(part.spec, part.descriptions, start.seconds)
                self._sources.append(source)
                for description in part.descriptions:
                    function = description["function"]
                    check = ArgumentCheck(function.get("parameters") or {}, closed="mcp" not in part.spec)
                    self._tools[function["name"]] = source, check
        except BaseException:
            self.close()
            raise

    async def call(self, call: Call) -> str:
        """Text of a call's result. Raises: ToolError, in words for the model."""
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {short(call.name)}; the tools are {', '.join(self._tools)}")
        source, check = self._tools[call.name]
        arguments = check.whole(call.arguments)
        if problems := check.problems(arguments):
            raise ToolError(f"wrong arguments for {call.name}: {problems}")
        return await source.call(call.name, arguments)

    def close(self) -> None:
        """End what the tools have started."""
        if not self._closed:
            self._closed = True
            for source in self._sources:
                source.close()


def _started(spec: Mapping[str, Any], descriptions: Sequence[Mapping[str, Any]], seconds: float) -> _Source:
    """Raises: ValueError."""
    if "function" in spec:
        return _Function(spec["function"], seconds)
    if "python" in spec:
        return _Python(spec["python"])
    from megarlhf.rollout.tools.mcp_servers import McpServer

    server = McpServer(spec, seconds)
    if json.dumps(server.start(), sort_keys=True) != json.dumps(list(descriptions), sort_keys=True):
        server.close()
        raise ValueError(
            f"the MCP server {spec['mcp']!r} describes its tools otherwise than at the start of the run; a server has "
            "to describe them alike whenever it starts"
        )
    return server


class _Python:
    """The Python tool."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        from megarlhf.rollout.tools.python.limits import PythonLimits
        from megarlhf.rollout.tools.python.tool import run_python

        self._limits, self._run = PythonLimits(**limits), run_python

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await self._run(arguments["code"], self._limits)

    def close(self) -> None:
        pass


class _Function:
    """A user's function."""

    def __init__(self, path: str, seconds: float) -> None:
        self._function: Callable[..., Any] = load_function(path, "tool")
        self._seconds = seconds

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            if inspect.iscoroutinefunction(self._function):
                returned = await self._awaited(self._function(**arguments))
            else:
                returned, error = await outside_loop(partial(_caught, partial(self._function, **arguments)))
                if error is not None:
                    raise ToolError(describe_error(error)) from error
                if inspect.isawaitable(returned):
                    returned = await self._awaited(returned)
        except (ToolError, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise ToolError(describe_error(error)) from error
        return text_of(returned)

    async def _awaited(self, awaitable: Any) -> Any:
        """The result of an async call. Raises: ToolError if it takes too long; what the call raises."""
        task = asyncio.ensure_future(_outcome(awaitable))
        try:
            await asyncio.wait({task}, timeout=self._seconds)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
            raise ToolError(f"took longer than {self._seconds:g} s")
        if task.cancelled():
            raise ToolError("the tool cancelled its own call")
        value, error = task.result()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        pass


def _caught(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return value or exception of a function. One that raises CancelledError must not look like a cancelled call."""
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - a tool that raises is an observation, whatever it raises
        return None, error


async def _outcome(awaitable: Any) -> tuple[Any, BaseException | None]:
    """Return value or exception of a call. SystemExit in a task would end the loop."""
    try:
        return await awaitable, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        return None, error


def text_of(returned: Any) -> str:
    """Result of a function as a text: a text as it is, other values as JSON. Raises: ToolError for what JSON
    cannot hold."""
    if isinstance(returned, str):
        return str(returned)
    try:
        return json.dumps(returned, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(
            f"the tool returned {short(returned)}, which is no text and nothing that JSON holds ({error})"
        ) from error
