"""A command of megarlhf as a process of its own, with all that it starts: seen, killed, waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "MEGARLHF_FAULTS_COMMAND"
"""Set in every process of a command, to its name."""
WORKERS, ENVIRONMENT_WORKER = "megarlhf.rollout.", "megarlhf.rollout.environments.worker"
"""Beginning of the modules that worker processes run, and the one that runs environments."""
START_SECONDS, END_SECONDS = 240.0, 420.0
POLL_SECONDS = 0.002


class Command:
    """`python -m megarlhf ARGV`, started at once. Its output goes to a file, from which it is read back."""

    def __init__(self, argv: Sequence[str], output: Path, environment: Mapping[str, str] | None = None) -> None:
        self._name, self._output = uuid.uuid4().hex, output
        outside = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "MEGARLHF_", "TORCHELASTIC_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        given = environment or {}
        paths = [path for path in (given.get("PYTHONPATH"), str(ROOT)) if path]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        self._environment = {**inherited, "OMP_NUM_THREADS": "1", **offline, **given}
        self._environment |= {"PYTHONPATH": os.pathsep.join(paths), MARK: self._name}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarlhf", *argv],
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """All output so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> int:
        """Until the launcher has ended.

        Raises: TimeoutError, with everything killed.
        """
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"still running after {END_SECONDS:.0f} s: {self._output}") from None

    def wait_until(self, happened: Callable[[], object], seconds: float = START_SECONDS) -> bool:
        """Until `happened`; False when the command ended before.

        Raises: TimeoutError, with everything killed.
        """
        end = time.monotonic() + seconds
        while not happened():
            if self.status is not None:
                return False
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"nothing for {seconds:.0f} s: {self._output}")
            time.sleep(POLL_SECONDS)
        return True

    def processes(self) -> dict[int, int]:
        """Process -> parent, of all that belong to the command and are no zombies."""
        return {pid: _parent(pid) for pid in _marked(self._name)}

    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order; a run of one rank is the launcher itself."""
        found = {}
        for pid, parent in self.processes().items():
            rank = _environ(pid).get("RANK")
            # A rank's workers have its environment; in a run of one rank the launcher is their parent.
            if parent == self.pid and rank is not None and not _is_worker(pid):
                found[int(rank)] = pid
        return [found[rank] for rank in sorted(found)] or [self.pid]

    def environment_workers(self) -> dict[int, int]:
        """Worker -> supervisor, of the processes that run environments."""
        found = {pid: parent for pid, parent in self.processes().items() if ENVIRONMENT_WORKER in _arguments(pid)}
        return {pid: parent for pid, parent in found.items() if parent in found}

    @staticmethod
    def writers(ranks: Sequence[int]) -> list[int]:
        """The processes that these ranks have forked to write a resume point. Guards have another name."""
        return [pid for rank in ranks for pid in _children(rank) if _name(pid) != "megarlhf-guard"]

    def kill(self, pids: Sequence[int] | None = None, number: int = signal.SIGKILL) -> None:
        """A signal to some processes, or to all of them as when a machine is lost: guards too."""
        for pid in self.processes() if pids is None else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if pids is None and number == signal.SIGKILL:
            self._process.wait()

    def left_over(self, seconds: float) -> list[str]:
        """What still runs so long after the launcher has ended."""
        end = time.monotonic() + seconds
        while (names := [f"{pid} {_name(pid)}" for pid in self.processes()]) and time.monotonic() < end:
            time.sleep(0.05)
        return names

    def stop(self) -> None:
        """Nothing of it is left running."""
        while self.processes():
            self.kill()
            time.sleep(0.01)


def _marked(name: str) -> Iterator[int]:
    wanted = f"{MARK}={name}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def _environ(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
    return {}


def _arguments(pid: int) -> list[str]:
    return _read(Path(f"/proc/{pid}/cmdline")).split("\0")


def _is_worker(pid: int) -> bool:
    return any(argument.startswith(WORKERS) for argument in _arguments(pid))


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _read(task / "children").split()
        ]
    return []


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
