"""A process that runs one user's reward function, so that the function can hang, exit or crash without a rank.

The rank starts it as `python -m megarlhf.rollout.rewards.worker FD`; FD is its end of a pipe. The standard library
only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection

from megarlhf.rollout.rewards.calls import call, form_of, load_function

_PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Load the function, then answer batches with outcomes until the rank closes the pipe."""
    # The signals of a job reach all of its processes; this one ends with its rank, whichever way that ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    connection = Connection(fd)
    try:
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
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
