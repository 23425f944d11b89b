"""A process that runs one user's reward function: `python -m megarlhf.rollout.rewards.worker FD RANK`, as
`workers/supervisor.py` says. Only the standard library is imported."""

from __future__ import annotations

import sys
from functools import partial
from multiprocessing.connection import Connection

from megarlhf.own_code.load import load_function
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import form_of
from megarlhf.rollout.workers.supervisor import run_child


def _answer(connection: Connection) -> None:
    """Load the function, then answer each batch with its results until the pipe is closed."""
    name, args, sys.path[:], seconds = connection.recv()
    try:
        function = load_function(name, "reward rule")
        function = partial(function, **args) if args else function
        form = form_of(function)
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send("")
    while True:
        connection.send(call(function, form, connection.recv(), seconds))


if __name__ == "__main__":
    run_child(int(sys.argv[1]), int(sys.argv[2]), _answer)
