"""A directory that appears whole or not at all, whatever kills its writer."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from os import PathLike
from pathlib import Path
from types import TracebackType

from megarlhf.atomic_write import sync

log = logging.getLogger(__name__)


class Staging:
    """Everything is written to `path`, a hidden sibling of `directory`, synced, and renamed when the `with` block
    ends well; when it raises, the sibling is removed. A sibling that a killed writer left behind is taken over.

    A lock is held to the end, so of two writers of one directory the second is refused. A `directory` that is a
    symbolic link stands for what it points to.
    """

    def __init__(self, directory: str | PathLike[str], *, force: bool = False) -> None:
        """`force` replaces an existing directory, at the very end.

        Raises: ValueError when the directory exists, is not empty, and `force` is off.
        """
        self.directory = Path(os.path.realpath(directory))
        self._force = force
        self.path = _hidden(self.directory, "partial")
        self._old, self._doomed = _hidden(self.directory, "replaced"), _hidden(self.directory, "deleted")
        self._lock_file = _hidden(self.directory, "lock")
        self._lock: int | None = None
        self._check_free()

    def __enter__(self) -> Staging:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take()
        try:
            self._recover()
            self._check_free()
            self.path.mkdir()
        except BaseException:
            self._release()
            raise
        return self

    @classmethod
    def bring_back(cls, directory: str | PathLike[str]) -> None:
        """Puts a directory back that a replacement, killed between its two renames, left under a hidden name."""
        staging = cls(directory, force=True)
        if not staging.directory.exists() and staging._old.exists():
            staging._lock = staging._take()
            try:
                staging._recover()
            finally:
                staging._release()

    def reserve(self, num_bytes: int) -> None:
        """Raises OSError (ENOSPC) unless the file system has room for so many bytes now."""
        free = shutil.disk_usage(self.directory.parent).free
        if free < num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes / 1e9:.3f} GB are needed beside {self.directory}, {free / 1e9:.3f} GB are free; make "
                "room or write elsewhere",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            if self.path.exists():
                shutil.rmtree(self.path)
            self._release()

    def _commit(self) -> None:
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        self._check_free()
        if self.directory.exists():
            os.rename(self.directory, self._old)
        try:
            os.rename(self.path, self.directory)
        except BaseException:
            if self._old.exists():
                os.rename(self._old, self.directory)
            raise
        sync(self.directory.parent)
        self._forget_old()

    def _forget_old(self) -> None:
        """Delete under another name: a half-deleted directory must not be taken for what was replaced."""
        if self._old.exists():
            os.rename(self._old, self._doomed)
            shutil.rmtree(self._doomed)

    def _check_free(self) -> None:
        taken = self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir()))
        if self.directory.is_mount():
            raise ValueError(f"{self.directory} is a mount point, which cannot be replaced; name a folder inside it")
        if taken and not (self._force and self.directory.is_dir()):
            raise ValueError(f"{self.directory} exists already; remove it or write to another directory")

    def _recover(self) -> None:
        """Finish or remove the leftovers of a killed writer: its partial output, an old output that was being replaced,
        or, if it was killed between its two renames, the old output under another name."""
        for folder in (self.path, self._doomed):
            if folder.exists():
                shutil.rmtree(folder)
        if self._old.exists():
            if self.directory.exists():
                self._forget_old()
            else:
                os.rename(self._old, self.directory)

    def _take(self) -> int:
        while True:
            lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                raise ValueError(
                    f"another process is writing {self.directory} (it holds {self._lock_file}); wait for it, or write "
                    "elsewhere"
                ) from error
            except OSError as error:  # a network file system without locks
                log.info("%s cannot be locked (%s); do not write it twice at a time", self._lock_file, error)
                return lock
            if self._is_lock_file(lock):
                return lock
            os.close(lock)  # its owner removed it in the meantime

    def _is_lock_file(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), self._lock_file.stat())
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._lock is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def replaced_by(directory: Path) -> Path:
    """Place of a directory between the two renames that replace it."""
    return _hidden(Path(os.path.realpath(directory)), "replaced")


def _hidden(directory: Path, suffix: str) -> Path:
    return directory.parent / f".{directory.name}.megarlhf-{suffix}"
