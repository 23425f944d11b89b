"""Conversations in a worker: their objects, and the calls that the rank asks for.

Only the standard library is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import traceback
from collections.abc import Callable, Coroutine, Mapping
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megarlhf.own_code.failures import cut, describe_error
from megarlhf.rollout.environments.answer import Answer, Turn, answer_of, opening_of
from megarlhf.rollout.environments.protocol import BeginCall, CallResult, ForgetCall, RunningCode, StepCall
from megarlhf.rollout.environments.user_code import CallError, CodeOwner, UserCode
from megarlhf.rollout.workers.messages import MessageStream

ALIVE_SECONDS = 1.0
"""Interval at which a worker notes that its event loop runs."""
_SHOWN, _SHOWN_BEFORE = 60, 20
"""Characters of an answer in a message, and how many of them stand before the first difference."""


class _Conversation(CodeOwner):
    """A conversation in this worker."""

    environment: Any = None
    """The user's object."""
    task: asyncio.Task[Answer]
    """Present call, or the last one."""


class ConversationHost:
    """The conversations of a worker. Each has at most one call at a time."""

    def __init__(
        self,
        environment: Callable[..., Any],
        args: Mapping[str, Any],
        seconds: float,
        connection: Connection,
        running: RunningCode,
    ) -> None:
        """
        environment: the user's class, made with `args`
        seconds: time limit of an async call
        """
        self._new_environment = lambda: environment(**deepcopy(dict(args)))  # each conversation has its own
        self._stream, self._fd, self._running = MessageStream(connection), connection.fileno(), running
        self._code = UserCode(running, seconds)
        self._conversations: dict[int, _Conversation] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def serve(self) -> None:
        """Answer calls until the rank closes the pipe."""
        self._code.loop.add_reader(self._fd, self._receive)
        self._note_alive()
        self._code.run()

    def _note_alive(self) -> None:
        self._running.alive()
        self._code.loop.call_later(ALIVE_SECONDS, self._note_alive)

    def _receive(self) -> None:
        try:
            for message in self._stream.receive():
                self._take(message)
        except (EOFError, OSError):
            self._code.loop.remove_reader(self._fd)
            self._ending = self._code.loop.create_task(self._end())
        except Exception:  # noqa: BLE001 - the rank would wait for ever; it starts another process
            traceback.print_exc()
            os._exit(1)

    def _take(self, message: Any) -> None:
        if isinstance(message, BeginCall):
            conversation = self._conversations[message.key] = _Conversation(message.key, message.seed)
            self._start(conversation, message.call, self._begin(conversation, message))
        elif isinstance(message, StepCall):
            conversation = self._conversations[message.key]
            self._start(conversation, message.call, self._step(conversation, message.turn))
        else:
            assert isinstance(message, ForgetCall), message
            self._drop(message.key)

    # --- calls ------------------------------------------------------------------------------------

    def _start(self, conversation: _Conversation, call: int, answer: Coroutine[Any, Any, Answer]) -> None:
        conversation.task = self._code.loop.create_task(answer)
        # A callback, and not a task that waits: user code may cancel all tasks.
        conversation.task.add_done_callback(partial(self._finish, conversation.key, call))

    def _finish(self, key: int, call: int, task: asyncio.Task[Answer]) -> None:
        """Send the result of a call. A conversation whose call has failed is dropped."""
        if task.cancelled():
            result = CallResult(key, call, error="was cancelled before it began")
        elif (error := task.exception()) is None:
            result = CallResult(key, call, task.result())
        elif isinstance(error, CallError):
            result = CallResult(key, call, None, str(error), error.late, error.drifted)
        else:
            result = CallResult(key, call, error=f"could not be called: {describe_error(error)}")
        try:
            self._stream.put(result)
        except Exception as error:  # noqa: BLE001 - lists in lists may be too deep for pickle
            result = CallResult(key, call, error=f"returned an answer that cannot be sent: {describe_error(error)}")
            self._stream.put(result)
        with contextlib.suppress(OSError):  # the rank has closed the pipe, which `_receive` sees too
            self._stream.send()
        if result.answer is None:
            self._drop(key)

    async def _begin(self, conversation: _Conversation, message: BeginCall) -> Answer:
        """Begin a conversation, and repeat the calls that it has had. Raises: CallError."""
        code = self._code
        fields = code.read(conversation, pickle.loads, message.fields)
        conversation.environment = await code.call(conversation, self._new_environment)
        returned = await code.call(conversation, _method(conversation, "reset"), fields, message.seed)
        answer = code.read(conversation, opening_of, returned)
        for recorded in message.history:
            if recorded.turn is not None:
                answer = await self._step(conversation, recorded.turn)
            _require_same(recorded.turn, answer, recorded.answer)
            answer = recorded.answer
        return answer

    async def _step(self, conversation: _Conversation, turn: Turn) -> Answer:
        returned = await self._code.call(conversation, _method(conversation, "step"), turn)
        answer: Answer = self._code.read(conversation, answer_of, returned)
        return answer

    # --- ends -------------------------------------------------------------------------------------

    def _drop(self, key: int) -> None:
        """End a conversation, and close its object."""
        if (conversation := self._conversations.pop(key, None)) is None:
            return  # after a failure
        conversation.task.cancel()
        task = self._code.loop.create_task(self._close(conversation))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self) -> None:
        """Close all objects, then stop. The rank kills a process that takes too long."""
        for key in list(self._conversations):
            self._drop(key)
        if self._closing:
            await asyncio.wait(self._closing)
        self._code.stop()

    async def _close(self, conversation: _Conversation) -> None:
        await self._code.end_tasks(conversation)
        try:
            close = _method(conversation, "close")
            if close is not None:
                await self._code.call(conversation, close)
        except CallError:
            pass  # the conversation is over, and nobody would read it


def _method(conversation: _Conversation, name: str) -> Any:
    """Method of the user's object; None if it has none. Raises: CallError if the object raises something else."""
    try:
        return getattr(conversation.environment, name, None)
    except BaseException as error:
        raise CallError(f"raised {describe_error(error)} for its attribute {name}") from error


def _require_same(turn: Turn | None, answer: Answer, recorded: Answer) -> None:
    """Check the answer to a repeated call. Raises: CallError if it is not the recorded one."""
    now, before = (json.loads(json.dumps(each.to_json())) for each in (answer, recorded))
    if now == before:
        return
    name = next(name for name in before if now[name] != before[name])
    shown_now, shown_before = _around_difference(json.dumps(now[name]), json.dumps(before[name]))
    where = "in reset" if turn is None else f"to turn {turn.number + 1}"
    raise CallError(
        f"answered otherwise {where} when recorded turns were repeated: {name} = {shown_now}, recorded was "
        f"{shown_before}; let it depend only on fields, seed and turns, not on time or on what is outside",
        drifted=True,
    )


def _around_difference(first: str, second: str) -> tuple[str, str]:
    """Both texts, shortened, from shortly before the first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(0, same - _SHOWN_BEFORE)
    dots = "..." if start else ""
    return dots + cut(first[start:], _SHOWN), dots + cut(second[start:], _SHOWN)
