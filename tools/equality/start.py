"""Commands of a version, forked from a process that has imported torch, Megatron-Core and transformers: a quick start.

Those imports are nine tenths of a small run. A forked process becomes a rank as under torchrun, with the version's own
files first on the path; the version's code is imported in it alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.utils.tensorboard",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.models.auto.auto_factory",
    "transformers.models.auto.tokenization_auto",
    "pydantic",
    "rich.progress",
)
RUN_SECONDS = 300.0
GRACE_SECONDS = 5.0
"""After a rank has failed, until the others are ended, which may wait for it."""
POLL_SECONDS = 0.002


def preload() -> None:
    """Import what all versions need, once. Nothing of it starts a thread, which a fork would lose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, every page that ranks share
    atexit.register(gc.unfreeze)  # Triton's bindings name as leaks what is left when the process ends


def fork(target: Callable[[], None], log: Path) -> int:
    """Call a function in a new process, the leader of its own session, with its output in a file. Returns: its pid."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lose all but one"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _live(target, log)
    return pid


def _live(target: Callable[[], None], log: Path) -> NoReturn:
    """The life of a forked process, which ends as an interpreter does but leaves its parent's frames alone."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        target()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # told in the file, and by the exit status
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def enter(root: Path, environment: Mapping[str, str]) -> None:
    """Working directory and environment of a command, in this process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(root)


def become_launcher(root: Path, environment: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """Replace this forked process by `python -m megarlhf ARGV`, which starts its ranks itself."""
    enter(root, environment)
    os.execve(sys.executable, [sys.executable, "-m", "megarlhf", *argv], dict(environment))


def become_command(root: Path, paths: Sequence[Path], environment: Mapping[str, str], argv: Sequence[str]) -> None:
    """Run `python -m megarlhf ARGV` in this forked process, of the version in `root`.

    Raises: RuntimeError where another version would be imported.
    """
    enter(root, environment)
    own = Path(__file__).resolve().parents[2]
    others = [path for path in sys.path if path and Path(path).resolve() != own]
    sys.path[:] = [str(root), *map(str, paths), *others]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "megarlhf")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("megarlhf")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != (root / "megarlhf/__init__.py").resolve():
        raise RuntimeError(f"`import megarlhf` takes {spec and spec.origin}, expected the one in {root}")
    sys.argv = ["megarlhf", *argv]
    runpy.run_module("megarlhf", run_name="__main__", alter_sys=True)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set in each rank of a run on this machine; nothing for one rank, which starts by itself."""
    if ranks == 1:
        return [{}]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class Processes:
    """The forked processes of one command."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._statuses: dict[int, int] = {}

    def wait(self, until: Path | None = None) -> str:
        """Until all have ended, or a path exists, when they are killed with all that they have started.

        Returns: why they have ended otherwise, in words; empty where they ended as they should.
        """
        deadline = time.monotonic() + RUN_SECONDS
        try:
            while (now := time.monotonic()) < deadline:
                if until is not None and until.exists():
                    return ""
                self._reap()
                if self._failures():
                    deadline = min(deadline, now + GRACE_SECONDS)
                if len(self._statuses) == len(self._pids):
                    break
                time.sleep(POLL_SECONDS if until is not None else 0.02)
            if failures := self._failures():
                return f"ended with status {', '.join(map(str, failures))}"
            if len(self._statuses) < len(self._pids):
                return f"still running after {RUN_SECONDS:.0f} s"
            return f"ended before {until.name} was there" if until is not None else ""
        finally:
            self._kill()

    def _failures(self) -> list[int]:
        return sorted({status for status in self._statuses.values() if status})

    def _reap(self) -> None:
        """Take note of those that have ended; the status of a signal is negative."""
        for pid in self._pids:
            if pid not in self._statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self._statuses[pid] = os.waitstatus_to_exitcode(ended[1])

    def _kill(self) -> None:
        """SIGKILL to those that are left, and to what they have started, in sessions of its own too."""
        left = [pid for pid in self._pids if pid not in self._statuses]
        for process in [psutil.Process(pid) for pid in left]:
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGKILL)
        for pid in left:
            self._statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
