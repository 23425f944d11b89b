"""A rank's thread that serves one worker process of environments, replaces it, and repeats what it has lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megarlhf.own_code.interpreter import path_for
from megarlhf.rollout.environments.answer import Answer, Turn
from megarlhf.rollout.environments.protocol import (
    AnsweredCall,
    BeginCall,
    CallResult,
    ForgetCall,
    RunningCode,
    StepCall,
    WorkerStart,
    new_running_fd,
)
from megarlhf.rollout.tools.start import ToolsStart
from megarlhf.rollout.workers.messages import MessageStream
from megarlhf.rollout.workers.process import POLL_SECONDS, WorkerError, WorkerProcess, WorkerRefusal, WorkerTimeout

START_PAUSES = (0.2, 1.0)
"""Pauses between tries to start a process that crashes at once, or that the system does not start. A module that fails
or hangs at import is not tried again."""
MAX_DEATHS = 3
"""Deaths of its process that a conversation survives without anybody's code running."""
CLOSE_SECONDS = 3.0
"""Longest time in which the objects of conversations are closed when the pool is closed."""
STUCK_SECONDS = 10.0
"""Time above the limit of a call after which a process is killed that runs nobody's code, and not its own either, such
as one in which a thread never lets go of the interpreter."""
_MODULE = "megarlhf.rollout.environments.worker"


class Reply(NamedTuple):
    """Answer of an environment, or why there is none."""

    key: int
    answer: Answer | None
    """Answer to the beginning (`done` False, no reward) or to the last turn."""
    error: str = ""
    """Reason why there is no answer, with the user's line where there is one."""
    late: bool = False
    """Whether a call took longer than the time limit."""
    drifted: bool = False
    """Whether the environment answered otherwise when recorded turns were repeated; `error` says which and how."""


@dataclass(eq=False)
class _Conversation:
    """A conversation, with what is needed to repeat it in another process."""

    key: int
    fields: bytes
    seed: int
    history: list[AnsweredCall]
    is_begun: bool = False
    """Whether the caller has the answer to the beginning."""
    turn: Turn | None = None
    """Turn that the caller waits for."""
    call: int = 0
    """Number of the call that the process is to answer; 0: none."""
    called_turn: Turn | None = None
    """Turn of that call; None: it begins the conversation, or repeats it."""
    deaths: int = 0
    failure: Reply | None = None
    """Failure of which the caller has not been told, as it waits for nothing."""

    @property
    def is_awaited(self) -> bool:
        return not self.is_begun or self.turn is not None


class _Worker:
    """A started process."""

    def __init__(self, start: Callable[[int], WorkerStart], closed: threading.Event, python: str | None) -> None:
        fd = new_running_fd()
        try:
            self.running = RunningCode(fd)
            self.process = WorkerProcess(_MODULE, start(fd), closed, pass_fds=[fd], python=python)
        finally:
            os.close(fd)
        self.fd = self.process.connection.fileno()
        os.set_blocking(self.fd, False)
        self.stream = MessageStream(self.process.connection)
        self.heard = time.monotonic()
        """Time of the last message."""


class WorkerThread:
    """Conversations of one worker process. Methods without an underscore are called by the rank, and do not wait."""

    def __init__(
        self,
        function: str,
        args: Mapping[str, Any],
        seconds_per_step: float,
        reply: Callable[[Reply], None],
        closed: threading.Event,
        interface: str = "megarlhf",
        python: str | None = None,
        tools: ToolsStart | None = None,
    ) -> None:
        """
        reply: takes one reply for each `begin` and each `step`
        closed: set when the pool is closed; `wake` must follow
        interface, python, tools: as for `EnvironmentPool`
        """
        self._start_message = lambda running_fd: WorkerStart(
            function, dict(args), interface, path_for(python), seconds_per_step, running_fd, tools
        )
        self._python = python
        self._seconds, self._reply, self._closed = seconds_per_step, reply, closed
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._conversations: dict[int, _Conversation] = {}
        self._worker: _Worker | None = None
        self._refusal = ""
        """Reason why no process can be started."""
        self._call_numbers = itertools.count(1)
        self._num_called, self._busy_since, self._busy_seconds = 0, 0.0, 0.0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Time in which the process had a call to answer."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self._num_called else 0.0)

    def begin(self, key: int, fields: bytes, seed: int, history: Sequence[AnsweredCall]) -> None:
        self._do(partial(self._begin, _Conversation(key, fields, seed, list(history))))

    def step(self, key: int, turn: Turn) -> None:
        self._do(partial(self._step, key, turn))

    def forget(self, key: int) -> None:
        self._do(partial(self._forget, key))

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def join(self) -> None:
        """Wait for the end of thread and process, after `closed` was set."""
        self._thread.join()
        os.close(self._wake_fd)

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self.wake()

    # --- what the rank asks for, in the thread ----------------------------------------------------

    def _begin(self, conversation: _Conversation) -> None:
        self._conversations[conversation.key] = conversation
        if self._refusal:
            self._fail(conversation, self._refusal)
        elif self._worker is not None:
            self._call_begin(self._worker, conversation)

    def _step(self, key: int, turn: Turn) -> None:
        conversation = self._conversations[key]
        conversation.turn = turn
        if conversation.failure is not None:
            self._tell(conversation, conversation.failure)
        elif self._worker is not None and not conversation.call:  # else the conversation is being repeated
            self._call_step(self._worker, conversation)

    def _forget(self, key: int) -> None:
        if (conversation := self._conversations.pop(key, None)) is None:
            return  # after a failure
        self._set_call(conversation, 0)
        if self._worker is not None and conversation.failure is None:
            self._worker.stream.put(ForgetCall(key))

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                while self._commands:
                    self._commands.popleft()()
                if self._worker is None and any(each.failure is None for each in self._conversations.values()):
                    self._start()
                self._exchange()
            except Exception as error:  # noqa: BLE001 - memory may be short, say; nobody may wait for ever
                self._fail_all(f"could not be called: {type(error).__name__}: {error}")
                self._closed.wait(POLL_SECONDS)  # it may happen again at once
        if self._worker is not None:
            self._worker.process.finish(CLOSE_SECONDS)
            self._end(self._worker)

    def _start(self) -> None:
        """Start a process, and begin or repeat all conversations in it."""
        for pause in (*START_PAUSES, None):
            try:
                worker = self._worker = _Worker(self._start_message, self._closed, self._python)
                break
            except Exception as error:  # noqa: BLE001 - the system may start no process, say
                if self._closed.is_set():
                    return
                failure = error
            if pause is None or isinstance(failure, (WorkerRefusal, WorkerTimeout)):
                why = str(failure) if isinstance(failure, WorkerError) else f"{type(failure).__name__}: {failure}"
                self._refusal = f"could not be started: {why}"
                self._fail_all(self._refusal)
                return
            if self._closed.wait(pause):
                return
        for conversation in self._conversations.values():
            if conversation.failure is None:
                self._call_begin(worker, conversation)

    def _exchange(self) -> None:
        """Wait for something to do. Send and receive messages, and watch over the process."""
        poll, worker = select.poll(), self._worker
        poll.register(self._wake_fd, select.POLLIN)
        if worker is None:
            poll.poll()
        else:
            events = select.POLLIN | (select.POLLOUT if worker.stream.has_unsent else 0)
            poll.register(worker.fd, events)
            ready = dict(poll.poll(1000 * self._seconds_to_wait(worker)))
            try:
                worker.stream.send()
                if ready.get(worker.fd, 0) & ~select.POLLOUT:
                    self._receive(worker)
                elif worker.process.has_ended():  # what it has started still holds the pipe open
                    raise EOFError
                self._require_progress(worker)
            except (EOFError, OSError):
                self._lost(worker, worker.process.end())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _receive(self, worker: _Worker) -> None:
        for result in worker.stream.receive():
            self._take(worker, result)
        worker.heard = time.monotonic()

    def _seconds_to_wait(self, worker: _Worker) -> float:
        """Time until a call may be overdue."""
        running = worker.running.read()
        left = running.since + self._seconds - time.monotonic() if running.key else self._seconds
        return min(max(left, 0.0) + 0.001, POLL_SECONDS)

    def _require_progress(self, worker: _Worker) -> None:
        """Kill a process that runs a conversation's code for too long, or that does not run at all."""
        running, now = worker.running.read(), time.monotonic()
        if running.key and now - running.since > self._seconds:
            worker.process.kill()
            self._lost(worker, f"took longer than {self._seconds:g} s", guilty=running.key, late=True)
        elif not running.key and now - max(running.alive, worker.heard) > self._seconds + STUCK_SECONDS:
            worker.process.kill()
            self._lost(worker, "hung without running an environment's code", guilty=0)

    def _lost(self, worker: _Worker, how: str, *, guilty: int | None = None, late: bool = False) -> None:
        """Take note that a process is gone. The conversation whose code was running has failed; the others are repeated
        in the next process, but not for ever."""
        guilty = worker.running.read().key if guilty is None else guilty
        self._end(worker)
        for conversation in [each for each in self._conversations.values() if each.failure is None]:
            conversation.deaths += not guilty
            if conversation.key == guilty:
                self._fail(conversation, how, late=late)
            elif conversation.deaths > MAX_DEATHS:
                self._fail(conversation, f"lost its process {conversation.deaths} times; the last one {how}")
            else:
                self._set_call(conversation, 0)

    def _end(self, worker: _Worker) -> None:
        self._worker = None
        worker.process.kill()
        worker.running.close()

    # --- calls and their results ------------------------------------------------------------------

    def _call_begin(self, worker: _Worker, conversation: _Conversation) -> None:
        self._set_call(conversation, next(self._call_numbers))
        worker.stream.put(
            BeginCall(conversation.key, conversation.call, conversation.fields, conversation.seed, conversation.history)
        )

    def _call_step(self, worker: _Worker, conversation: _Conversation) -> None:
        assert conversation.turn is not None
        self._set_call(conversation, next(self._call_numbers), conversation.turn)
        worker.stream.put(StepCall(conversation.key, conversation.call, conversation.turn))

    def _set_call(self, conversation: _Conversation, call: int, turn: Turn | None = None) -> None:
        was_busy = self._num_called > 0
        self._num_called += (call != 0) - (conversation.call != 0)
        conversation.call, conversation.called_turn = call, turn
        if was_busy != (self._num_called > 0):
            if was_busy:
                self._busy_seconds += time.monotonic() - self._busy_since
            else:
                self._busy_since = time.monotonic()

    def _take(self, worker: _Worker, result: CallResult) -> None:
        """Take the result of a call; one of a forgotten conversation is dropped."""
        conversation = self._conversations.get(result.key)
        if conversation is None or conversation.call != result.call:
            return
        turn, answer = conversation.called_turn, result.answer
        if answer is None:
            self._fail(conversation, result.error, late=result.late, drifted=result.drifted)
            return
        self._set_call(conversation, 0)
        if turn is not None or not conversation.history:
            conversation.history.append(AnsweredCall(turn, answer))
        if turn is not None:
            conversation.turn = None
            self._reply(Reply(conversation.key, answer))
        elif not conversation.is_begun:
            conversation.is_begun = True
            self._reply(Reply(conversation.key, answer))
        elif conversation.turn is not None:
            self._call_step(worker, conversation)

    # --- failures ---------------------------------------------------------------------------------

    def _fail(self, conversation: _Conversation, error: str, *, late: bool = False, drifted: bool = False) -> None:
        """End a conversation. The caller is told at once, or when it asks for the next answer."""
        if conversation.call and conversation.called_turn is None and conversation.history and not drifted:
            error = f"{error} (while its recorded turns were repeated)"
        self._set_call(conversation, 0)
        conversation.failure = Reply(conversation.key, None, error, late, drifted)
        if conversation.is_awaited:
            self._tell(conversation, conversation.failure)

    def _tell(self, conversation: _Conversation, failure: Reply) -> None:
        del self._conversations[conversation.key]
        self._reply(failure)

    def _fail_all(self, error: str) -> None:
        if self._worker is not None:
            self._end(self._worker)
        for conversation in list(self._conversations.values()):
            if conversation.failure is None:
                self._fail(conversation, error)
