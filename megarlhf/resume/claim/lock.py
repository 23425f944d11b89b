"""`run.dir/lock`: the run directory belongs to one run at a time.

The file names its holder and is refreshed every few seconds. It works on network file systems and between hosts: it
is made by `link`, which one of several processes achieves, and nothing depends on flock or on clocks that agree.

A lock that its holder left behind is taken over. Of several newcomers one may follow the holder with token T: the one
that makes `lock.T`. It then renames `lock.T` to `lock`. A newcomer that dies between the two is a holder that died,
and is followed in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

LOCK_FILE = "lock"

REFRESH_SECONDS = 5.0
"""Between two refreshes of the lock by its holder."""
WATCH_SECONDS = 30.0
"""A holder that cannot be asked (on another host) has gone when its lock was not refreshed for so long."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

log = logging.getLogger(__name__)


class LockError(ValueError):
    """The run directory belongs to another run, or a lock cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a run directory, as `lock` names it."""

    token: str
    """Of this one time that a lock was taken."""
    host: str
    pid: int
    started: int | None
    """Start of the process in clock ticks since boot (/proc/PID/stat): tells it from a later one of the same number."""
    boot: str | None
    """The kernel's boot id."""
    pid_namespace: str | None
    """In which `pid` counts; a container may have its own."""
    command: str
    job: str | None
    """CLUSTER/ID of the Slurm job."""
    restart: int
    """How often Slurm has queued the job again (SLURM_RESTART_COUNT)."""
    since: str
    """When the lock was taken, for people."""

    @classmethod
    def this_process(cls) -> Holder:
        """This process, with a new token."""
        job = os.environ.get("SLURM_JOB_ID")
        state = _process(os.getpid())
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=state[1] if state else None,
            boot=_boot_id(),
            pid_namespace=_pid_namespace(),
            command=shlex.join(sys.argv)[:500],
            job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else None,
            restart=restart_count(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    def __str__(self) -> str:
        job = f", Slurm job {self.job.rpartition('/')[2]} (restart {self.restart})" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.since}: {self.command}"


def restart_count() -> int:
    """How often Slurm has queued this job again; 0 for its first attempt, and outside Slurm."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


class Lock:
    """A lock that this process holds; refreshed by a thread until it is released."""

    def __init__(self, path: Path, holder: Holder, note: str | None) -> None:
        """Not for callers: `take` makes it."""
        self.path, self.holder, self.note = path, holder, note
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="megarlhf-lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, run_dir: Path) -> Lock:
        """Take the lock of `run_dir`, which exists; `note` says in a sentence whose lock was taken over, if any.

        Raises: LockError, with nothing touched, when its holder lives.
        """
        path, mine = run_dir / LOCK_FILE, Holder.this_process()
        while True:
            chain = _chain(path)
            if not chain:
                if _create(path, mine):
                    return cls(path, mine, None)
                continue
            last, why = chain[-1], _why_dead(path, chain)
            if why is None:
                raise LockError(_refusal(run_dir, last))
            successor = _successor(path, last)
            if not why or not _create(successor, mine):
                continue  # something has changed; look again
            current = _read(path)
            if current is None or current.token != chain[0].token:
                successor.unlink(missing_ok=True)  # late: somebody has followed, and `lock.T` was free again
                continue
            os.rename(successor, path)
            for holder in chain[:-1]:
                _successor(path, holder).unlink(missing_ok=True)
            return cls(path, mine, f"{path} was left behind by {last}; taken over, because {why}")

    def require_held(self) -> None:
        """To be called before anything is written that another run may not write at the same time.

        Raises: LockError when another process has taken the lock.
        """
        current = _read(self.path)
        if current is None:  # somebody has removed it by hand
            log.warning("%s was gone; made again", self.path)
            current = self.holder if _create(self.path, self.holder) else _read(self.path)
        if current is None or current.token != self.holder.token:
            whose = f"now held by {current}" if current else "gone"
            raise LockError(
                f"this run has lost its run directory: {self.path} is {whose}. This process could not refresh the lock "
                f"for {WATCH_SECONDS:.0f} s, or the file was removed while another run started. Nothing more is "
                "written here"
            )

    def release(self) -> None:
        """Remove the lock, if it is still this process's. May be called again."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join(REFRESH_SECONDS)
        # As a newcomer would: nobody else can follow us in the meantime, and what we remove is ours.
        successor = _successor(self.path, self.holder)
        with contextlib.suppress(OSError, LockError):
            leaving = dataclasses.replace(self.holder, token=uuid.uuid4().hex)
            current = _read(self.path)
            if current is None or current.token != self.holder.token:
                return
            try:
                may_remove = _create(successor, leaving)
            except OSError:  # a full disk: nobody else can make it either
                may_remove = True
            if may_remove:
                self.path.unlink()
                successor.unlink(missing_ok=True)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _refresh(self) -> None:
        failing = False
        while not self._released.wait(REFRESH_SECONDS):
            try:
                current = _read(self.path)
                if current is not None and current.token != self.holder.token:
                    log.error("%s was taken by %s; nothing more will be saved here", self.path, current)
                    return
                if current is not None:
                    os.utime(self.path)
                failing = False
            except (OSError, LockError) as error:  # a file server that is away for a moment
                if not failing:
                    log.warning("%s cannot be refreshed (%s); trying again", self.path, error)
                failing = True


def held_by(run_dir: Path) -> Holder | None:
    """The living holder of the directory; None when it is free. Touches nothing; may watch for `WATCH_SECONDS`."""
    path = run_dir / LOCK_FILE
    while chain := _chain(path):
        why = _why_dead(path, chain)
        if why is None:
            return chain[-1]
        if why:
            return None
    return None


def require_free(run_dir: Path) -> None:
    """Raises LockError when another run holds the directory. Touches nothing; may watch for `WATCH_SECONDS`."""
    if (holder := held_by(run_dir)) is not None:
        raise LockError(_refusal(run_dir, holder))


def _refusal(run_dir: Path, holder: Holder) -> str:
    return (
        f"run.dir = {run_dir} belongs to a run that is running: {holder}. Two runs in one directory would destroy each "
        "other; nothing was touched. Wait for that run or stop it, or name another run.dir. In a copy of that run's "
        f"directory, remove {run_dir / LOCK_FILE}"
    )


def _why_dead(path: Path, chain: list[Holder]) -> str | None:
    """Why the last of the chain has gone; None when it lives, and "" when the lock has changed meanwhile.

    A process of this machine is looked up, an earlier attempt of this Slurm job is over; any other is watched.
    """
    last = chain[-1]
    here = (socket.gethostname(), _boot_id(), _pid_namespace())
    if None not in here and (last.host, last.boot, last.pid_namespace) == here:
        running = _runs(last)
        if running is not None:
            return None if running else "that process has ended"
    job, cluster = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_CLUSTER_NAME", "")
    if job and last.job == f"{cluster}/{job}" and last.restart != restart_count():
        return "it was an earlier attempt of this Slurm job" if last.restart < restart_count() else None
    return _watch(path if len(chain) == 1 else _successor(path, chain[-2]), last)


def _watch(path: Path, holder: Holder) -> str | None:
    log.warning("%s is held by %s; watching for up to %.0f s whether it lives", path, holder, WATCH_SECONDS)
    first, deadline = _modified(path), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(REFRESH_SECONDS, WATCH_SECONDS) / 10)
        if (now := _modified(path)) != first:
            current = _read(path)
            return None if now is not None and current is not None and current.token == holder.token else ""
    return f"it has not refreshed its lock for {WATCH_SECONDS:.0f} s"


def _modified(path: Path) -> tuple[int, int] | None:
    try:
        with path.open("rb") as file:  # opening asks the server of a network file system anew
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _chain(path: Path) -> list[Holder]:
    """The holder, and those that were following one that died when they died."""
    chain: list[Holder] = []
    holder = _read(path)
    while holder is not None:
        chain.append(holder)
        holder = _read(_successor(path, holder))
    return chain


def _successor(path: Path, holder: Holder) -> Path:
    return path.with_name(f"{path.name}.{holder.token}")


def _read(path: Path, attempts: int = 20) -> Holder | None:
    """The holder that the file names; None without one.

    Raises: LockError for a file that is no lock; it may be half written for a moment where there are no links.
    """
    for _ in range(attempts):
        try:
            return Holder(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, IsADirectoryError):
            time.sleep(0.05)
    raise LockError(
        f"{path} is none of megarlhf's locks, or a damaged one; remove it if no run uses {path.parent}, or name "
        "another run.dir"
    )


def _create(path: Path, holder: Holder) -> bool:
    """Make the file, complete, unless it is there; of several processes one succeeds."""
    text = json.dumps(dataclasses.asdict(holder), indent=1) + "\n"
    partial = path.with_name(f".{LOCK_FILE}.{holder.token}.partial")
    try:
        _write_new(partial, text)
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(path, text)
        return True
    except FileExistsError:
        # A network file system may repeat a request whose answer was lost.
        return (current := _read(path)) is not None and current.token == holder.token
    finally:
        partial.unlink(missing_ok=True)


def _write_new(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _runs(holder: Holder) -> bool | None:
    """Whether a process of this machine runs; None when that cannot be told."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    state = _process(holder.pid)
    if state is None or holder.started is None:
        return None
    return state[0] not in "ZX" and state[1] == holder.started


def _process(pid: int) -> tuple[str, int] | None:
    """State and start time of a process, from /proc; None where that does not say."""
    text = _text(Path(f"/proc/{pid}/stat"))
    if text is None:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _boot_id() -> str | None:
    return _text(Path("/proc/sys/kernel/random/boot_id"))


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
