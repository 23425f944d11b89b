"""The two processes that run one user's code: a child that may hang, exit or crash, and its supervisor.

A module that is run as `python -m MODULE FD RANK` calls `run_child`; FD is the worker's end of a pipe, RANK the rank's
process id. The process forks. The child runs the user's code. The parent is the supervisor: it ends every process that
the code started. Orphaned processes become children of the supervisor, even those in a session of their own. Only the
standard library is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

END = signal.SIGRTMAX
"""Signal that tells the supervisor to end everything. A job never sends it to all of its processes."""
END_SECONDS = 5.0
"""Time after which processes are given up that SIGKILL does not end: of another user, or waiting for a device."""
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def run_child(fd: int, rank: int, answer: Callable[[Connection], None]) -> None:
    """Fork into supervisor and child. The child calls `answer` with its end of the pipe, and returns when that returns
    or the rank has closed the pipe."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, children would leave no status
    supervisor = os.getpid()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, END)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != rank:
        return
    if runner := os.fork():
        os.close(fd)
        _supervise(runner)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        return
    os.setsid()  # signals of the user's code to its process group must not reach the supervisor
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    _ignore_job_signals(connection)
    with contextlib.suppress(EOFError, OSError):
        answer(connection)


def _ignore_job_signals(connection: Connection) -> None:
    """Ignore signals that a job sends to all of its processes: this process ends with its rank.

    Processes that the user's code starts keep the usual behaviour. Programs do because a handler is installed here and
    not SIG_IGN. Forked children do by the fork hooks, which also close the pipe: a child could hold it open, or answer
    in place of this process.
    """
    handlers = {number: signal.signal(number, _ignore) for number in _JOB_SIGNALS}
    thread_state = threading.local()

    def block() -> None:  # a signal that reaches a new child is delivered after its handlers are restored
        thread_state.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, thread_state.mask)

    def restore_in_child() -> None:
        connection.close()
        for number, handler in handlers.items():
            if signal.getsignal(number) is _ignore:
                # Not Python's own handler of SIGINT: an exception in a hook is lost.
                signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore_in_child)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _supervise(runner: int) -> NoReturn:
    """Wait until the child `runner` ends, or the rank sends END or dies. Then kill every process that is left."""
    statuses: dict[int, int] = {}
    while runner not in statuses and signal.sigwait({END, signal.SIGCHLD}) != END:
        _reap(statuses)
    until = time.monotonic() + END_SECONDS
    while _reap(statuses) and time.monotonic() < until:
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    _end_as(os.waitstatus_to_exitcode(statuses.get(runner, 0)))


def _reap(statuses: dict[int, int]) -> bool:
    """Record the status of each child that has ended. Returns whether any child is left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _children() -> Iterator[int]:
    """Process ids of this process's children, including orphans that it inherited. Read from /proc/PID/stat, because
    not every kernel has /proc/PID/task/PID/children."""
    own = os.getpid()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            parent = path.read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == own:
                yield int(path.parent.name)


def _end_as(code: int) -> NoReturn:
    """End this process with the exit status of another; a negative `code` is a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the other process has left its own core
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # the limit does not apply where cores are piped to a program
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os._exit(abs(code))
