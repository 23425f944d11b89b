"""Calls of the Python tool. Only the standard library is imported."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import marshal
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import megarlhf
from megarlhf.rollout.tools.call import ToolError
from megarlhf.rollout.tools.python.guard import FOLDER_PREFIX
from megarlhf.rollout.tools.python.isolation import PROTECTIONS
from megarlhf.rollout.tools.python.limits import PythonLimits

_ROOT = str(Path(megarlhf.__file__).parents[1])
_GUARD = f"import sys; sys.path[0] = {_ROOT!r}\nfrom megarlhf.rollout.tools.python.guard import main; sys.exit(main())"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each further one reserves 64 MB of the address space, which is limited
}
_SWEEP_SECONDS = 60.0
"""Age from which a folder without an owner is removed. A younger one may be about to be locked."""
_WITHOUT = {
    "landlock": "Landlock is missing (Linux 5.13 or later, and not forbidden in a container): code of the Python tool "
    "can read and write the files of this user",
    "seccomp": "seccomp filters are missing: code of the Python tool can use the network, start programs, and send "
    "signals to processes of this user",
}
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
"""Free places of a loop, which is the only one of its process."""


def missing_protection() -> list[str]:
    """Sentences on what this system cannot protect against. Calls run nevertheless."""
    return [_WITHOUT[name] for name, exists in PROTECTIONS.items() if not exists()]


async def run_python(code: str, limits: PythonLimits, without: Collection[str] = ()) -> str:
    """Output of the code, and the value of its last line if that is an expression.

    limits: the time of the call begins when its process starts: no more run at once than there are processors
    without: protections that are not used, `landlock` or `seccomp`, as on a system that lacks them

    Raises: ToolError if the code exceeds a limit or crashes. RuntimeError if it could not be run, which is not the
    model's fault.
    """
    request = {
        "code": code,
        "limits": dataclasses.asdict(limits),
        "parent": os.getpid(),
        "base": tempfile.gettempdir(),
        "root": _ROOT,
        "libraries": _libraries(),
        "protections": [name for name, exists in PROTECTIONS.items() if name not in without and exists()],
    }
    async with _slots_of(asyncio.get_running_loop()):
        answer, status = await _ask_guard(marshal.dumps(request))
    try:
        output, why = marshal.loads(answer)
    except (EOFError, ValueError, TypeError):
        words = answer.decode("utf-8", "replace").strip()
        raise RuntimeError(f"the Python tool's guard ended with status {status} and no answer: {words}") from None
    if why is not None:
        raise ToolError(f"The code {why}." + (f" Its output until then:\n{output}" if output else ""))
    return output or "(no output)"


async def _ask_guard(request: bytes) -> tuple[bytes, int]:
    """Answer of a guard, and its exit status."""
    environment = _ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-s", "-S", "-B", "-c", _GUARD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # a guard that cannot work says so there
        start_new_session=True,
        env=environment,
        cwd="/",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(request).to_bytes(8, "little") + request)
        return await process.stdout.read(), await process.wait()
    finally:
        process.stdin.close()  # a guard that still works ends the code now
        await process.wait()


def _slots_of(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    if loop not in _slots:
        remove_old_folders()
        _slots[loop] = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    return _slots[loop]


def remove_old_folders() -> None:
    """Remove folders of guards that were ended by SIGKILL."""
    for folder in Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"):
        with contextlib.suppress(OSError):  # of another user, has an owner, or has just been removed
            info = folder.lstat()
            if info.st_uid != os.geteuid() or time.time() - info.st_mtime < _SWEEP_SECONDS:
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(fd)


def _libraries() -> list[str]:
    """Folders of installed packages. Those of the run, such as the current folder, are not among them."""
    folders: list[Any] = [*site.getsitepackages(), site.getusersitepackages()]
    return [folder for folder in folders if folder in sys.path]
