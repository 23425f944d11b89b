"""`run.dir/lock`: the run directory belongs to one run at a time, by a lease (`megarlhf/lease.py`)."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from megarlhf import lease
from megarlhf.lease import Holder, Lease, Look

LOCK_FILE = "lock"
WATCH_SECONDS = 30.0
"""A holder that cannot be asked (on another host) has gone when its lock was not refreshed for so long."""

log = logging.getLogger(__name__)


class LockError(ValueError):
    """The run directory belongs to another run, or a lock cannot be read."""


class Lock(Lease):
    """A run directory's lock."""

    def __init__(self, run_dir: Path) -> None:
        """Make a lock that is not taken yet; `run_dir` exists."""
        super().__init__(run_dir / LOCK_FILE, silent_seconds=WATCH_SECONDS)

    @classmethod
    def take(cls, run_dir: Path) -> Lock:
        """Take the lock of `run_dir`; `note` says whose lock was taken over, if any.

        Raises: LockError, with nothing touched, when its holder lives.
        """
        lock = cls(run_dir)
        while not lock.try_take(lock.require_free()):
            pass
        return lock

    def require_free(self) -> Look:
        """Look until it is known whether another run lives that holds the directory; touches nothing.

        Raises: LockError when it lives, or when the file is no lock.
        """
        watched = None
        while True:
            look = self.look()
            for holder in look.chain:
                self._require_readable(holder)
            if look.may_be_taken:
                return look
            holder = look.chain[-1]
            if look.verdict == "lives":
                raise LockError(
                    f"run.dir = {self.path.parent} belongs to a run that is running: {holder}. Two runs in one "
                    "directory would destroy each other; nothing was touched. Wait for that run or stop it, or name "
                    f"another run.dir. In a copy of that run's directory, remove {self.path}"
                )
            if watched != holder:
                watched, seconds = holder, WATCH_SECONDS
                log.warning("%s is held by %s; watching for up to %.0f s whether it lives", self.path, holder, seconds)
            time.sleep(min(lease.REFRESH_SECONDS, WATCH_SECONDS) / 10)

    def require_held(self) -> None:
        """Make sure that the lock is still this process's. Call this before writing what two runs may not write at
        once.

        Raises: LockError when another process has taken the lock.
        """
        current = self.read(self.path)
        if current is None:  # somebody has removed it by hand
            log.warning("%s was gone; made again", self.path)
            current = self.holder if self.create(self.path, self.holder) else self.read(self.path)
        self._require_readable(current)
        if current is None or current.token != self.holder.token:
            whose = f"now held by {current}" if current else "gone"
            raise LockError(
                f"this run has lost its run directory: {self.path} is {whose}. This process could not refresh the lock "
                f"for {WATCH_SECONDS:.0f} s, or the file was removed while another run started. Nothing more is "
                "written here"
            )

    def _require_readable(self, holder: Holder | None) -> None:
        if holder is not None and not holder.is_known:
            raise LockError(
                f"{self.path} is none of megarlhf's locks, or a damaged one; remove it if no run uses "
                f"{self.path.parent}, or name another run.dir"
            )
