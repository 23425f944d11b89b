"""A lease: a file that belongs to one process at a time, and is taken over if that process dies.

The file names its holder, which refreshes the file's time every few seconds. It works on network file systems and
between hosts: it is made by `link`, which succeeds for one of several processes, and needs neither flock nor
synchronized clocks.

A file that a dead holder left behind is taken over. Several processes may try: the one that makes `FILE.T`, where T is
the token of the dead holder, succeeds. It then renames `FILE.T` to `FILE`. If it dies between the two, it is a dead
holder too, and is followed in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

REFRESH_SECONDS = 5.0
"""Time between two refreshes by the holder."""
READ_ATTEMPTS = 20
"""Attempts to read a file, which may be half written for a moment on file systems without links."""

Verdict = Literal["free", "lives", "unknown", "ended", "silent"]
"""State of the holder. `free`: there is none; `unknown`: look again; `ended`: its process has ended; `silent`: it has
not refreshed the file for too long."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a lease, as the file names it."""

    token: str
    """Unique for each time that a lease is taken."""
    host: str
    pid: int
    started: int | None = None
    """Start of the process in clock ticks since boot (/proc/PID/stat); a later process of that pid has another."""
    boot: str | None = None
    """The kernel's boot id."""
    pid_namespace: str | None = None
    """Namespace of `pid`; a container may have its own."""
    command: str = ""
    job: str | None = None
    """CLUSTER/ID of the Slurm job."""
    restart: int = 0
    """How often Slurm has queued the job again (SLURM_RESTART_COUNT)."""
    since: str = ""
    """Time when the lease was taken, as text."""

    @classmethod
    def this_process(cls) -> Holder:
        """This process, with a new token."""
        job = os.environ.get("SLURM_JOB_ID")
        state = _process_state(os.getpid())
        host, boot, pid_namespace = _machine()
        return cls(
            token=uuid.uuid4().hex,
            host=host,
            pid=os.getpid(),
            started=state[1] if state else None,
            boot=boot,
            pid_namespace=pid_namespace,
            command=shlex.join(sys.argv)[:500],
            job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else None,
            restart=restart_count(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    @property
    def is_known(self) -> bool:
        """Whether the file names a process. It does not if it is damaged or no lease."""
        return bool(self.host)

    def __str__(self) -> str:
        job = f", Slurm job {self.job.rpartition('/')[2]} (restart {self.restart})" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.since}: {self.command}"

    def state(self) -> tuple[Literal["lives", "unknown", "ended"], str]:
        """State of the process, as far as this machine and Slurm's variables show it, and the reason if it ended."""
        here = _machine()
        if None not in here and here == (self.host, self.boot, self.pid_namespace):
            running = self._runs_here()
            if running is not None:
                return ("lives", "") if running else ("ended", "that process has ended")
        job, cluster = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_CLUSTER_NAME", "")
        if job and self.job == f"{cluster}/{job}" and self.restart != restart_count():
            earlier = self.restart < restart_count()
            return ("ended", "it was an earlier attempt of this Slurm job") if earlier else ("lives", "")
        return "unknown", ""

    def _runs_here(self) -> bool | None:
        """Whether the process runs on this machine; None if that cannot be determined."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        state = _process_state(self.pid)
        if state is None or self.started is None:
            return None
        return state[0] not in "ZX" and state[1] == self.started


@dataclass(frozen=True)
class Look:
    """State of a lease at one moment."""

    verdict: Verdict
    """State of the last holder in `chain`."""
    chain: Sequence[Holder] = ()
    """The holder, followed by processes that died while they took over from the one before."""
    reason: str = ""
    """Reason why the last of the chain is considered dead."""

    @property
    def may_be_taken(self) -> bool:
        return self.verdict in ("free", "ended", "silent")


class Lease:
    """A file with one holder at a time. A thread refreshes it from `try_take` to `release`.

    lease = Lease(path, silent_seconds=30)
    while not (look := lease.look()).may_be_taken or not lease.try_take(look):
        time.sleep(0.1)
    with lease: ...
    """

    def __init__(self, path: Path, *, silent_seconds: float, token_key: str = "token") -> None:
        """silent_seconds: time without a refresh, measured here, after which a holder on another machine counts as dead
        token_key: the token's name in the file
        """
        self.path, self.holder = path, Holder.this_process()
        self.note = ""
        """Message about a file that was taken over, with its owner and the reason."""
        self._silent_seconds, self._token_key = silent_seconds, token_key
        self._seen: tuple[str, tuple[int, int] | None] | None = None
        """Token and time of the watched file, unchanged since `_since`."""
        self._since = 0.0
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="megarlhf-lease", daemon=True)

    def look(self) -> Look:
        """Look once, without any change. A process of this machine is looked up. Any other one is watched: from the
        second look on, it lives if it has refreshed its file in between."""
        chain: list[Holder] = []
        file = self.path
        while (holder := self.read(file)) is not None:
            chain.append(holder)
            watched, file = file, self._successor(holder)
        if not chain:
            return Look("free")
        holder = chain[-1]
        state, reason = holder.state()
        if state != "unknown":
            return Look(state, chain, reason)
        now, seen = time.monotonic(), (holder.token, _modified(watched))
        if self._seen is None or self._seen[0] != holder.token:
            self._seen, self._since = seen, now
        elif seen != self._seen:
            if self.read(watched) == holder:  # else the file has a new holder meanwhile
                self._seen, self._since = seen, now
                return Look("lives", chain)
        elif now - self._since >= self._silent_seconds:
            return Look("silent", chain, f"it has not refreshed its lock for {self._silent_seconds:.0f} s")
        return Look("unknown", chain)

    def try_take(self, look: Look) -> bool:
        """Become the holder after a `look` that `may_be_taken`. False: the file has changed since, so look again."""
        if not look.chain:
            taken = self.create(self.path, self.holder)
        elif taken := self.create(self._successor(look.chain[-1]), self.holder) and self._rename(look):
            self.note = f"{self.path} was left behind by {look.chain[-1]}; taken over, because {look.reason}"
        if taken:
            self._thread.start()
        return taken

    def _rename(self, look: Look) -> bool:
        successors = [self._successor(holder) for holder in look.chain]
        current = self.read(self.path)
        if current is None or current.token != look.chain[0].token:
            successors[-1].unlink(missing_ok=True)  # too late: another process took over, and `FILE.T` was free again
            return False
        os.rename(successors[-1], self.path)
        for successor in successors[:-1]:
            successor.unlink(missing_ok=True)
        return True

    def read(self, file: Path) -> Holder | None:
        """Holder that a lease, or the file of a successor, names. None without a file; not `is_known` for a file that
        names nobody."""
        for _ in range(READ_ATTEMPTS):
            try:
                tree: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return Holder(token=tree.pop(self._token_key), **tree)
            except FileNotFoundError:
                return None
            except (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError):
                time.sleep(0.05)
        modified = _modified(file)
        return None if modified is None else Holder(token=f"unreadable-{modified[0]}", host="", pid=0)

    def create(self, file: Path, holder: Holder) -> bool:
        """Make a complete file unless it exists; only one of several processes succeeds."""
        tree = dataclasses.asdict(holder)
        text = json.dumps({self._token_key: tree.pop("token"), **tree}, indent=1) + "\n"
        partial = self.path.with_name(f".{self.path.name}.{holder.token}.partial")
        try:
            _write_new(partial, text)
            try:
                os.link(partial, file)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                _write_new(file, text)
            return True
        except FileExistsError:
            # A network file system may repeat a request whose answer was lost.
            return (current := self.read(file)) is not None and current.token == holder.token
        finally:
            partial.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the file, if it is still this process's. May be called again."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join(REFRESH_SECONDS)
        # As a successor would: so no other process can take over meanwhile, and the file that is removed is ours.
        successor = self._successor(self.holder)
        with contextlib.suppress(OSError):
            current = self.read(self.path)
            if current is None or current.token != self.holder.token:
                return
            try:
                may_remove = self.create(successor, dataclasses.replace(self.holder, token=uuid.uuid4().hex))
            except OSError:  # a full disk: no other process can make it either
                may_remove = True
            if may_remove:
                self.path.unlink()
                successor.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _successor(self, holder: Holder) -> Path:
        return self.path.with_name(f"{self.path.name}.{holder.token}")

    def _refresh(self) -> None:
        failing = False
        while not self._released.wait(REFRESH_SECONDS):
            try:
                if (current := self.read(self.path)) is not None:
                    if not current.is_known:
                        raise OSError("it does not name its holder")
                    if current.token != self.holder.token:
                        log.error("%s was taken by %s; this process has lost it", self.path, current)
                        return
                    os.utime(self.path)
                failing = False
            except OSError as error:  # a file server that does not answer for a moment
                if not failing:
                    log.warning("%s cannot be refreshed (%s); trying again", self.path, error)
                failing = True


def restart_count() -> int:
    """How often Slurm has queued this job again; 0 for its first attempt, and outside Slurm."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _modified(path: Path) -> tuple[int, int] | None:
    """Inode and time of a file; None without one."""
    try:
        with path.open("rb") as file:  # opening makes a network file system ask its server
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _write_new(path: Path, text: str) -> None:
    """Write a new file; if that fails, it does not exist afterwards."""
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _process_state(pid: int) -> tuple[str, int] | None:
    """State and start time of a process, from /proc; None if /proc does not have it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def _machine() -> tuple[str, str | None, str | None]:
    """Host, boot and pid namespace of this process, as in a `Holder`."""
    boot = pid_namespace = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, pid_namespace
