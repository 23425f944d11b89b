"""A rank ends with the process that started it, and a rank's own processes end with the rank, even after SIGKILL.

This is for ranks of a plain start and of torchrun; under srun Slurm does it. The module imports nothing slow: before
`end_with_parent` has run, a rank can be left over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PARENT = "MEGARLHF_PARENT"
"""Variable in ranks of a plain start: the pid of the process that started them."""
BUSY = "MEGARLHF_BUSY"
"""Variable of a process that runs a command, and of those that it starts: the command, or the function of
`import megarlhf`. A module that they import may start nothing."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LOOK_SECONDS = 5.0


def end_with_parent() -> None:
    """End this rank of a plain start or of torchrun when the process that started it dies, or has died already.

    Nothing is lost by ending at once: files of a run get their names when they are complete. Ctrl-C ends a rank of a
    plain start without a traceback, until `StopRequest` handles it.
    """
    parent = os.environ.get(PARENT)
    if sys.platform != "linux" or (parent is None and "TORCHELASTIC_RUN_ID" not in os.environ):
        return
    _when_parent_dies(signal.SIGKILL)
    if parent is not None:
        if os.getppid() != int(parent):
            os._exit(128 + signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getpgrp() == os.getpid():  # all processes of the group are this rank's
        _guard()


def _when_parent_dies(signum: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def _guard() -> None:
    """Start a small process that outlives this one and then ends the rest of its process group.

    The kernel's signal at a parent's death does not reach grandchildren, nor children that a library has started.
    """
    leader = os.getpid()
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(0, 1024)  # readers of our output wait until it is closed
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _when_parent_dies(signal.SIGTERM)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"megarlhf-guard")
        while os.getppid() == leader:
            signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)
