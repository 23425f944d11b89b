"""A rank's end of a worker process: starting it, asking it, and ending it.

pebble.ProcessPool does less: it kills the worker but not what the user's code started, a busy worker outlives a killed
rank, SIGTERM to a job ends its workers, and a forked child of a function can answer on the pipe that workers share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

from megarlhf.own_code.interpreter import command_of, variables_of
from megarlhf.rollout.workers.supervisor import END, END_SECONDS

START_SECONDS = 120.0
"""Time limit for importing the user's module."""
POLL_SECONDS = 0.5
"""Interval at which a waiting thread checks whether the pool was closed."""


class WorkerError(RuntimeError):
    """No answer from a worker. The message says why."""


class WorkerTimeout(WorkerError):
    """No answer within the time limit."""


class WorkerRefusal(WorkerError):
    """Words of a worker that cannot use what it was started with, such as a module that fails at import."""


class WorkerProcess:
    """A process with its supervisor (`supervisor.py`) and a pipe to it. Used by one thread, and ends with that
    thread."""

    def __init__(
        self,
        module: str,
        first: Any,
        closed: threading.Event,
        pass_fds: Sequence[int] = (),
        python: str | None = None,
    ) -> None:
        """
        module: run with `python -m`; it calls `run_child`
        first: message to which the process answers with "", or with why it refuses
        closed: set when the pool is closed and no answer is needed
        pass_fds: file descriptors that the process inherits, under the same numbers
        python: interpreter that runs the module's `main`; None: that of the rank

        Raises: WorkerError, after which there is no process.
        """
        self._closed = closed
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command_of(module, python), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *pass_fds],
                env=variables_of(python),
                stdin=subprocess.DEVNULL,
                # The supervisor ends what the user's code started: it must outlive a kill of the rank's process group.
                start_new_session=True,
            )
        try:
            refusal = self.ask(first, START_SECONDS, " to import the module")
        except Exception as error:
            if not isinstance(error, WorkerError):  # what cannot be pickled, say
                self.kill()
            raise
        if refusal:
            self.kill()
            raise WorkerRefusal(refusal)

    def ask(self, message: Any, seconds: float, purpose: str = "") -> Any:
        """The answer to a message. `purpose` ends the words about a time-out.

        Raises: WorkerError, after which the worker is gone.
        """
        try:
            self.connection.send(message)
            until = time.monotonic() + seconds
            while not self.connection.poll(min(POLL_SECONDS, max(0.0, until - time.monotonic()))):
                if self._closed.is_set():
                    self.kill()
                    raise WorkerError("was ended with the run")
                if time.monotonic() >= until:
                    self.kill()
                    raise WorkerTimeout(f"took longer than {seconds:g} s{purpose}")
                if self.has_ended() and not self.connection.poll():
                    raise WorkerError(self.end())  # a process that could not be ended still holds the pipe open
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(self.end()) from error

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> str:
        """Wait for the end of the process. Returns how it ended."""
        self.connection.close()
        until = time.monotonic() + 2 * END_SECONDS
        while (status := self._wait(POLL_SECONDS)) is None:
            if self._closed.is_set() or time.monotonic() >= until:
                self.kill()
                return "closed its pipe"
        if status < 0:
            return f"ended its process by signal {-status} ({_signal_name(-status)})"
        return f"ended its process with status {status}; a function must return, not exit"

    def finish(self, seconds: float) -> None:
        """Close the pipe, and wait until the process ends by itself, but no longer than that."""
        self.connection.close()
        self._wait(seconds)

    def kill(self) -> None:
        """End the process and everything that it started, whatever state it is in."""
        self.connection.close()
        self._process.send_signal(END)
        if self._wait(2 * END_SECONDS) is None:
            self._process.kill()
            self._process.wait()

    def _wait(self, seconds: float) -> int | None:
        """Exit status of the process; None if it has not ended in this time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "unknown"
