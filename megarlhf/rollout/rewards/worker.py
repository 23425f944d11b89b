"""A process that runs one user's reward function, so that the function can hang, exit or crash without a rank.

The rank starts it as `python -m megarlhf.rollout.rewards.worker FD RANK`; FD is its end of a pipe, RANK the rank's
process. It forks: the child runs the function, and the parent, the supervisor, sees to it that whatever the function
has started ends with it. Processes that lose their parent become the supervisor's children, also those that made a
session of their own. The standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megarlhf.rollout.rewards.calls import call, load_function
from megarlhf.rollout.rewards.forms import form_of

END = signal.SIGRTMAX
"""Tells the supervisor to end everything. No signal that a job's processes get together, which are not for it."""
END_SECONDS = 5.0
"""Until processes are given up that SIGKILL does not end: those of another user, or those that wait for a device."""
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main(fd: int, rank: int) -> None:
    """In the child, returns when the rank has closed the pipe."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave no status
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
    os.setsid()  # what the function sends to its process group does not reach the supervisor
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    _leave_job_signals(connection)
    with contextlib.suppress(EOFError, OSError):
        _answer(connection)


def _answer(connection: Connection) -> None:
    """Load the function, then answer batches with outcomes until the pipe is closed."""
    name, args, sys.path[:], seconds = connection.recv()
    try:
        function = load_function(name)
        function = partial(function, **args) if args else function
        form = form_of(function)
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send("")
    while True:
        connection.send(call(function, form, connection.recv(), seconds))


def _leave_job_signals(connection: Connection) -> None:
    """The signals of a job reach all of its processes; this one ends with its rank, whichever way that ends.

    What the function starts gets what it would have otherwise: programs since these are handlers, not SIG_IGN, and
    forked children by the hooks. Those also lose the pipe: they could hold it open, or answer in our place.
    """
    before = {number: signal.signal(number, _take_no_notice) for number in _JOB_SIGNALS}
    forking = threading.local()

    def hold() -> None:  # what reaches a child at once comes when its handlers are back
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def in_child() -> None:
        connection.close()
        for number, handler in before.items():
            if signal.getsignal(number) is _take_no_notice:
                # Not Python's own handler of SIGINT: an exception in a hook is lost.
                signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=in_child)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_no_notice(number: int, frame: FrameType | None) -> None:
    pass


def _supervise(runner: int) -> NoReturn:
    """Until the child `runner` has ended, or the rank says so or has died; then all that is left is ended."""
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
    """Add the status of each child that has ended. Returns whether there are others."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _children() -> Iterator[int]:
    """Of this process: those of them that die hand theirs on to it. Not by /proc/PID/task/PID/children, which not every
    kernel has."""
    own = os.getpid()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = path.read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == own:
                yield int(path.parent.name)


def _end_as(code: int) -> NoReturn:
    """With the status of another process; negative: by that signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the other one has left its own
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # where a core goes to a program the limit does not count
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os._exit(abs(code))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
