"""What needs a process of its own but not a new interpreter: it is forked from the server that ranks are forked from,
which has imported torch and Megatron."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.command import ROOT, outside_a_run


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function at the top of a module returns, or raises, there: with the environment of the caller, since
    the server has that of the test in which it was started."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_take_on, initargs=(dict(os.environ),)) as process:
        return process.submit(function, *arguments).result()


def _take_on(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server's


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m NAME ARGUMENTS`, at the repository's root and outside any launcher's run."""
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder) / "stdout", Path(folder) / "stderr"]
        status = apart(_run_module, name, arguments, outside_a_run(), written)
        return subprocess.CompletedProcess([name, *arguments], status, *[path.read_text() for path in written])


def _run_module(name: str, arguments: tuple[str, ...], environment: dict[str, str], written: list[Path]) -> int:
    _take_on(environment)
    os.chdir(ROOT)
    sys.argv = [name, *arguments]
    for number, path in enumerate(written, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    status: Any = 0
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status)
