"""User code under another Python interpreter, which has other packages than this one, and not megarlhf.

Only the standard library is imported: the processes under that interpreter load this module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.own_code.failures import cut

SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Variable of each process that runs environments, or generates records: an iteration over a set has one order."""
OLDEST = (3, 10)
"""Oldest Python that can run environments."""
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


def require_executable(python: Path, what: str) -> Path:
    """The path of an interpreter. `what`: its key, for messages. Raises: ValueError for what is no executable file."""
    if not python.is_file() or not os.access(python, os.X_OK):
        got = "is a folder" if python.is_dir() else "is not executable" if python.exists() else "does not exist"
        raise ValueError(f"{what} = {python} {got}; give the path of a Python, such as /path/to/venv/bin/python")
    return python


def command_of(module: str, python: str | None) -> list[str]:
    """Command that runs a module with a function `main`, under this interpreter or under another one."""
    if python is None:
        return [sys.executable, "-m", module]
    return [os.path.abspath(python), str(_BOOTSTRAP), module]


def variables_of(python: str | None) -> dict[str, str]:
    """Environment variables of such a process."""
    kept = {name: value for name, value in os.environ.items() if python is None or name != "PYTHONHOME"}
    return kept | SAME_HASHES


def path_for(python: str | None) -> list[str] | None:
    """`sys.path` for such a process; None: its own, which has the entries of PYTHONPATH."""
    return list(sys.path) if python is None else None


def ask_process(
    module: str, request: Mapping[str, Any], python: str | None, label: str, seconds: float | None = None
) -> dict[str, Any]:
    """Ask a module, whose `main` calls `answer_request`, in a process of its own.

    label: what is asked about, for messages

    Raises: ValueError with what the module says, or with why there is no answer.
    """
    message = json.dumps({"path": path_for(python), **request}, default=str)
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:  # what the code has started may hold a pipe open
        try:
            done = subprocess.run(
                command_of(module, python),
                env=variables_of(python),
                input=message,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=seconds,
                check=False,
            )
            answer: dict[str, Any] = json.loads(done.stdout)
        except OSError as error:
            raise ValueError(f"{label}: {python or sys.executable} cannot be run: {error}; {_REMEDY}") from error
        except subprocess.TimeoutExpired:
            raise ValueError(f"{label}: its module took longer than {seconds:g} s; let it import less") from None
        except ValueError:
            if python is not None:
                _require_python(python, label)
            stderr.seek(0)
            last = cut(" ".join(stderr.read().strip().splitlines()[-1:]), 300) or "it has written nothing"
            status = done.returncode
            raise ValueError(f"{label}: its process ended without an answer (status {status}): {last}") from None
    if answer["error"]:
        under = "" if python is None else f" (under {python}, which has its own packages)"
        raise ValueError(f"{answer['error']}{under}")
    return answer


_REMEDY = f"give the path of a Python, {OLDEST[0]}.{OLDEST[1]} or later, such as /path/to/venv/bin/python"


def _require_python(python: str, label: str) -> None:
    """Raises: ValueError if the interpreter is no Python, or one that is too old."""
    program = "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [os.path.abspath(python), "-c", program], capture_output=True, text=True, timeout=20, check=False
        )
        version = tuple(int(part) for part in done.stdout.split("."))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise ValueError(f"{label}: {python} is no Python; {_REMEDY}") from None
    if version < OLDEST:
        raise ValueError(f"{label}: {_too_old(python, version)}")


def _too_old(python: str, version: Sequence[int]) -> str:
    return f"{python} is Python {version[0]}.{version[1]}, which is too old; {_REMEDY}"


def answer_request(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Read the request of `ask_process`, and print the answer. What user code prints goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        if (path := request.pop("path")) is not None:
            sys.path[:] = path
        if sys.version_info < OLDEST:
            written = json.dumps({"error": _too_old(sys.executable, sys.version_info[:2])})
        else:
            try:
                written = json.dumps({**answer(request), "error": ""})
            except ValueError as error:
                written = json.dumps({"error": str(error)})
        output.write(written)
    os._exit(0)  # without waiting for threads of the user's
