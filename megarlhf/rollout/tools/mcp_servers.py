"""Tools of an MCP server, by the package `mcp`, which is imported when a server is started.

The client runs in a thread with an event loop of its own: the worker's loop stands still while a function that is not
async runs, and a server must not look dead then. A call is never repeated, since it may have had an effect. Instead the
server is asked for a sign of life before each call, and started anew if it is gone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import shlex
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from megarlhf.data.text.tool_keys import without_key
from megarlhf.own_code.failures import cut, describe_error, error_text
from megarlhf.rollout.tools.call import ToolError

START_SECONDS = 60.0
"""Time limit for the start of a server and the list of its tools."""
CLOSE_SECONDS = 6.0
"""Time limit for its end. The package closes its input, then sends SIGTERM and SIGKILL, 2 s apart."""
PING_SECONDS = 2.0
"""Time limit of a sign of life. A server that is busy gives none, and is called all the same."""
LONGEST_PAUSE = 5.0
"""Longest pause before a server that crashes at each call is started anew."""
_NO_SUCH_METHOD = -32601
"""Number of the error of JSON-RPC."""
_TAIL = 2000
"""Bytes of a server's error output that are kept."""


class McpServer:
    """An MCP server: a process of its own, or a connection to a URL."""

    def __init__(self, spec: Mapping[str, Any], seconds: float) -> None:
        """
        spec: `{mcp: COMMAND OR URL}`, with `names`, `env` and `cwd` if wanted
        seconds: time limit of a call
        """
        self._spec, self._seconds = spec, seconds
        self._label = f"the MCP server {spec['mcp']!r}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connection: _Connection | None = None
        self._restart = asyncio.Lock()
        self._descriptions: list[dict[str, Any]] = []
        self._failures = 0
        """Starts since the last call that had a result."""
        self._in_flight = 0
        self._is_late = False
        """Whether the last call that ended took too long."""

    def start(self) -> list[dict[str, Any]]:
        """Start the server. Returns the descriptions of its tools. Raises: ValueError."""
        # Imported here, and not first in the thread, which could wait for an import of this one.
        import jsonschema  # noqa: F401
        import mcp.client.stdio
        import mcp.client.streamable_http  # noqa: F401

        # A line that is no message is reported as an error with its traceback.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        self._thread.start()
        future = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        try:
            self._descriptions = future.result(START_SECONDS + 2 * CLOSE_SECONDS)
        except FutureTimeout:
            future.cancel()
            self.close()
            raise ValueError(f"{self._label} did not start in {START_SECONDS:g} s") from None
        except BaseException:
            self.close()
            raise
        return self._descriptions

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Text of the result. Raises: ToolError, in words for the model."""
        future = asyncio.run_coroutine_threadsafe(self._call(name, dict(arguments)), self._loop)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the server and everything that it has started."""
        if not self._thread.is_alive():
            return
        future = asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop)
        with contextlib.suppress(FutureTimeout):
            future.result(CLOSE_SECONDS + 1)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    # --- in the thread ------------------------------------------------------------------------------

    async def _connect(self) -> list[dict[str, Any]]:
        """Raises: ValueError."""
        self._connection = _Connection(self._spec, self._label)
        return await self._connection.open()

    async def _disconnect(self) -> None:
        if (connection := self._connection) is not None:
            self._connection = None
            await connection.close()

    async def _living(self) -> _Connection:
        """The connection, or a new one if the server has ended. Raises: ToolError."""
        async with self._restart:
            if self._connection is not None and not await self._is_lost(self._connection):
                return self._connection
            await self._disconnect()
            await asyncio.sleep(min(LONGEST_PAUSE, 0.1 * 2**self._failures) if self._failures else 0.0)
            self._failures += 1
            try:
                descriptions = await self._connect()
            except ValueError as error:
                raise ToolError(f"the tool's server cannot be started again: {error}") from error
            if descriptions != self._descriptions:
                await self._disconnect()
                raise ToolError("the tool's server was started again, and describes other tools now")
            assert self._connection is not None, "connected"
            return self._connection

    async def _is_lost(self, connection: _Connection) -> bool:
        """Whether the server has ended, or hangs: it gives no sign of life although it has nothing to do."""
        answers = await connection.answers()
        return answers is False or (answers is None and self._is_late and not self._in_flight)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        connection = await self._living()
        self._in_flight += 1
        self._is_late = False
        try:
            result = await asyncio.wait_for(connection.session.call_tool(name, arguments), self._seconds)
        except asyncio.TimeoutError:
            self._is_late = True
            raise ToolError(f"took longer than {self._seconds:g} s") from None
        except Exception as error:  # of the package: the server's refusal, a result of another shape, a lost connection
            if await connection.answers() is False:
                raise ToolError("the tool's server ended during the call") from error
            if type(error).__name__ == "ValidationError":
                raise ToolError("the tool's server returned something that is no result of a tool") from error
            raise ToolError(cut(error_text(error), 1000)) from error
        finally:
            self._in_flight -= 1
        self._failures = 0
        text = "\n".join(_parts(result))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or "the tool failed, and says nothing more")
        return text


class _Connection:
    """A session with a server. It is opened and closed in one task, as the package demands."""

    def __init__(self, spec: Mapping[str, Any], label: str) -> None:
        self._spec, self._label = spec, label
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._errors = _Tail()
        self._task: asyncio.Task[None]
        self.session: Any

    async def open(self) -> list[dict[str, Any]]:
        """Descriptions of the server's tools. Raises: ValueError."""
        self._task = asyncio.create_task(self._run())
        await asyncio.wait({self._opened}, timeout=START_SECONDS)
        if self._opened.done():
            if (error := self._opened.exception()) is None:
                return self._opened.result()
            await self.close()
            raise ValueError(self._why(error)) from error
        await self.close()
        if self._opened.done():
            self._opened.exception()  # of its end; nobody else asks for it, which the loop would report
        raise ValueError(f"{self._label} did not answer in {START_SECONDS:g} s{self._errors.words()}")

    async def close(self) -> None:
        if not self._opened.done() and not self._closing.is_set():
            self._task.cancel()
        self._closing.set()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        self._errors.close()

    async def answers(self) -> bool | None:
        """Whether the server is there; None: it gives no answer, as one that is busy."""
        if self._task.done():
            return False
        try:
            await asyncio.wait_for(self.session.send_ping(), PING_SECONDS)
        except asyncio.TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001 - of the package
            # "No such method" is an answer too. Other refusals are of a server that has forgotten the session.
            return getattr(error, "code", None) == _NO_SUCH_METHOD
        return True

    async def _run(self) -> None:
        try:
            async with self._session() as session:
                self.session = session
                described = await self._described(session)
                self._opened.set_result(described)
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 - groups of the package, and its cancellation
            if self._opened.done():
                return  # the connection was lost, which `answers` tells
            self._opened.set_exception(_first(error))

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        target = self._spec["mcp"]
        if target.startswith(("http://", "https://")):
            transport: Any = streamable_http_client(target)
        else:
            try:
                command, *args = shlex.split(target)
            except ValueError as error:
                raise ValueError(
                    f"{self._label} is no command ({error}); write it as in a shell, or give a URL"
                ) from error
            cwd, names = self._spec.get("cwd"), self._spec.get("env") or ()
            if missing := [name for name in names if name not in os.environ]:
                raise ValueError(f"{self._label} needs the variable {missing[0]}, which is not set; export it")
            env = {name: os.environ[name] for name in names}
            parameters = StdioServerParameters(
                command=command, args=args, env=env, cwd=cwd, encoding_error_handler="replace"
            )
            transport = stdio_client(parameters, errlog=self._errors.file)
        async with transport as streams, ClientSession(streams[0], streams[1]) as session:
            yield session

    async def _described(self, session: Any) -> list[dict[str, Any]]:
        """Raises: ValueError."""
        from mcp import types

        await session.initialize()
        tools, cursor = [], None
        while True:
            page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                break
        by_name = {tool.name: tool for tool in tools}
        wanted = list(self._spec.get("names") or by_name)
        if missing := [name for name in wanted if name not in by_name]:
            raise ValueError(
                f"{self._label} has no tool {missing[0]!r}; it has {', '.join(by_name) or 'none'}: correct names"
            )
        if not wanted:
            raise ValueError(f"{self._label} has no tools; name another server")
        if len(by_name) < len(tools):
            raise ValueError(f"{self._label} has two tools of one name; a call has nothing but the name")
        return [self._description(by_name[name]) for name in wanted]

    def _description(self, tool: Any) -> dict[str, Any]:
        """Raises: ValueError for a schema of arguments that is none."""
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for

        schema = without_key(json.loads(json.dumps(tool.input_schema)), "title")  # some templates would not write it
        try:
            validator_for(schema, default=Draft202012Validator).check_schema(schema)
        except SchemaError as error:
            where = ".".join(map(str, error.absolute_path))
            raise ValueError(
                f"{self._label}: the schema of the arguments of {tool.name!r} is no JSON schema ({where}: "
                f"{cut(error.message, 200)}); correct the server, or leave the tool out (names)"
            ) from error
        function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
        return {"type": "function", "function": function}

    def _why(self, error: BaseException | None) -> str:
        if isinstance(error, ValueError):
            return error_text(error)
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            return f"{self._label} cannot be started: {error_text(error)}; give a command that is found, or a URL"
        if error is None or _is_closed(error):
            return f"{self._label} ended before it answered{self._errors.words()}"
        return f"{self._label} cannot be used: {describe_error(error)}{self._errors.words()}"


class _Tail:
    """A pipe for a server's error output, of which the end is kept."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.file = os.fdopen(write, "w")
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._thread.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as pipe:
            while content := pipe.read(65536):
                self._kept = (self._kept + content)[-_TAIL:]

    def words(self) -> str:
        """The last line, for a message."""
        self.close()
        self._thread.join(0.5)  # a process that the server has started may hold the pipe open
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return f"; its last words: {cut(lines[-1].strip(), 300)}" if lines else ""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


def _parts(result: Any) -> Iterator[str]:
    """Texts of a result's parts."""
    for part in result.content:
        if part.type == "text":
            yield part.text
        elif part.type == "resource":
            resource = part.resource
            yield resource.text if hasattr(resource, "text") else _left_out("a file", resource.blob)
        elif part.type == "resource_link":
            yield str(part.uri)
        else:
            yield _left_out({"image": "an image", "audio": "a sound"}.get(part.type, f"a part {part.type}"), part.data)


def _left_out(what: str, content: str) -> str:
    with contextlib.suppress(ValueError):
        return f"({what} of {len(base64.b64decode(content)):,} bytes is left out)"
    return f"({what} is left out)"


def _first(error: BaseException) -> BaseException:
    """The first exception inside groups."""
    while (inside := getattr(error, "exceptions", None)) is not None:
        error = inside[0]
    return error


def _is_closed(error: BaseException) -> bool:
    """Whether the package says that the connection is closed."""
    names = ("ClosedResourceError", "BrokenResourceError", "EndOfStream")
    return type(_first(error)).__name__ in names or "onnection closed" in error_text(error)
