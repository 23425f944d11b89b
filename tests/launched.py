"""A command that launches two ranks, in a process of its own that need not import torch first: it is forked."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

from megarlhf.commands import launch
from tests.command import ROOT


class Command:
    """`rank` is a program; it is given `arguments`. Signals in `ignored` are so from the start, as under nohup."""

    cpu_seconds: ClassVar[float] = 0.0
    """Of all that have ended by themselves, and of their ranks."""

    def __init__(self, rank: str, arguments: list[str], stderr: Path, ignored: tuple[int, ...]) -> None:
        names = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "MEGARLHF_LAUNCHED")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        self._stderr = stderr
        context = multiprocessing.get_context("forkserver")
        self._times, theirs = context.Pipe(duplex=False)
        what = (rank, arguments, environment, str(stderr), ignored, theirs)
        self._process = context.Process(target=_launch, args=what, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 60) -> None:
        self._process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s: {self._stderr.read_text()}"
        with contextlib.suppress(EOFError):  # it was killed, or has been waited for
            Command.cpu_seconds += self._times.recv()

    def stderr(self, timeout: float) -> str:
        """What it and its ranks have written, when it has ended."""
        self.wait(timeout)
        return self._stderr.read_text()


def _launch(
    rank: str,
    arguments: list[str],
    environment: dict[str, str],
    stderr: str,
    ignored: tuple[int, ...],
    times: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    tempfile.tempdir = None  # the server's
    for number in (signal.SIGHUP, *ignored):  # which is ignored where the tests run under nohup
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    status = launch.local_ranks(2, arguments, ["-c", rank])
    times.send(sum(os.times()[:4]))
    sys.exit(status)
