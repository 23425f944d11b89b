"""Processes that `make bench-packing` measures in turn: JSON lines through pipes, one command at a time.

A child that waits is blocked in a read and uses no core. Its standard output is kept for answers: what libraries
print goes to its standard error, a file that is shown when the child ends without being asked to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.peers import install

Message = dict[str, Any]


class Child:
    """A process of `python -m MODULE JSON`; `facts` is what it said when it was ready."""

    def __init__(self, module: str, options: Message, env: dict[str, str]) -> None:
        self._name = module
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (lives as long as the child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(options)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.facts = self._answer()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def ask(self, command: str, **arguments: Any) -> Message:
        """Have it do something and wait for the answer. Raises: RuntimeError with its last lines if it ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End it by closing its input, or by a signal if it does not listen."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Message:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            tail = "\n".join(self._errors.read().splitlines()[-25:])
            raise RuntimeError(f"{self._name} ended with status {status}:\n{tail}")
        answer: Message = json.loads(line)
        return answer


class Parent:
    """The other end of a `Child`'s pipes, made before anything is printed."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        threading.Thread(target=self._end_with, args=(os.getppid(),), daemon=True).start()

    @staticmethod
    def _end_with(parent: int) -> None:
        """A benchmark that is killed leaves no one who computes until its command is done. Not by the kernel's signal
        at a parent's death: it comes with the end of the thread that started the child."""
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    def say(self, answer: Message) -> None:
        """Answer the command, or, as the first thing that is said, that this process is ready."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def next(self) -> Message | None:
        """The next command; None when there will be no other."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def next_of(self, does: dict[str, Callable[..., Message]]) -> Message | None:
        """The next command that is none of these, which are answered by their functions."""
        while (message := self.next()) is not None and message["command"] in does:
            self.say(does[message.pop("command")](**message))
        return message

    def serve(self, does: dict[str, Callable[..., Message]]) -> None:
        """Answer commands by these functions until there are no more."""
        message = self.next_of(does)
        assert message is None, f"expected a command of {', '.join(does)}, got {message}"


def environment(threads: int, paths: Sequence[str | os.PathLike[str]] = ()) -> dict[str, str]:
    """Of a child that computes with so many threads; `paths` come before everything else that it imports."""
    python_path = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(python_path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def trl_environment(threads: int) -> dict[str, str]:
    """The environment to run TRL in; installs it first where it is missing.

    Raises: UnavailableError where pip cannot.
    """
    return environment(threads, [install("trl", ("trl", "accelerate"))])
