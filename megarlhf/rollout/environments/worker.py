"""A process that runs a user's environment: `python -m megarlhf.rollout.environments.worker FD RANK`, as
`workers/supervisor.py` says. Only the standard library is imported, and numpy if it is installed."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megarlhf.rollout.environments.checks import check_environment
from megarlhf.rollout.environments.gymnasium_adapter import adapted
from megarlhf.rollout.environments.host import ConversationHost
from megarlhf.rollout.environments.protocol import RunningCode, WorkerStart
from megarlhf.rollout.environments.tools.environment import ToolEnvironment, parser_of
from megarlhf.rollout.environments.tools.toolbox import ToolBox
from megarlhf.rollout.tools.start import ToolsStart
from megarlhf.rollout.workers.supervisor import run_child


def _answer(connection: Connection) -> None:
    """Load the class, then answer calls until the pipe is closed."""
    start: WorkerStart = connection.recv()
    running = RunningCode(start.running_fd)
    os.close(start.running_fd)
    if start.path is not None:
        sys.path[:] = start.path
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")  # before a conversation draws from it
    with contextlib.ExitStack() as stack:
        args, seconds = start.args, start.seconds_per_step
        try:
            if start.tools is not None:
                environment: Callable[..., Any] = _tool_environment(start.tools, stack)
                args, seconds = {}, math.inf  # each call of a tool has a time limit of its own
            else:
                environment = check_environment(start.function, start.args, start.interface)
        except ValueError as error:
            connection.send(str(error))
            return
        if start.interface == "gymnasium":
            environment = partial(adapted, environment)
        host = ConversationHost(environment, args, seconds, connection, running)
        connection.send("")
        host.serve()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of the user's


def _tool_environment(tools: ToolsStart, stack: contextlib.ExitStack) -> Callable[[], ToolEnvironment]:
    """Start the tools, and return what makes the environment of a conversation. Raises: ValueError."""
    box = stack.enter_context(contextlib.closing(ToolBox(tools)))
    parse = parser_of(tools)
    return lambda: ToolEnvironment(box, parse, tools)


def main() -> None:
    """Run as the arguments of the command line say."""
    run_child(int(sys.argv[1]), int(sys.argv[2]), _answer)


if __name__ == "__main__":
    main()
