"""Runs with environments that do not end in order, after which the engine is closed for the next test all the same."""

import contextlib
from unittest import mock

from megarlhf.rollout.engine import EngineFailure
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl import loop
from tests.distributed.interrupted_jobs import at_call
from tests.distributed.jobs import command_status


def failing_command(runtime: Runtime, *argv: str) -> tuple[int, str]:
    """`command_status` of a run that fails."""
    with mock.patch.object(loop, "closed_at_the_end", contextlib.closing):
        return command_status(runtime, *argv)


def failing_engine(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[int, str]:
    """A run whose engine fails at the call numbered `calls` of a method that it calls: status, and what was written."""
    with at_call(calls, owner, method, _fail):
        try:
            return failing_command(runtime, *argv)
        except EngineFailure as error:
            return 1, str(error)


def _fail() -> None:
    raise RuntimeError("planted in the engine")
