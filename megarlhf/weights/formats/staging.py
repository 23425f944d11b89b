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

log = logging.getLogger(__name__)


class Staging:
    """Everything is written to `path`, a hidden sibling of `directory`, synced, and renamed when the `with` block
    ends well; when it raises, the sibling is removed. A sibling that a killed writer left behind is taken over.

    The sibling is locked, so of two writers of one directory the second is refused.
    """

    def __init__(self, directory: str | PathLike[str], *, force: bool = False) -> None:
        """`force` replaces an existing directory, at the very end.

        Raises: ValueError when the directory exists, is not empty, and `force` is off.
        """
        self.directory = Path(directory).absolute()
        self._force = force
        self.path = self.directory.parent / f".{self.directory.name}.partial"
        self._old = self.directory.parent / f".{self.directory.name}.old"
        self._lock: int | None = None
        self._check_free()

    def __enter__(self) -> Staging:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take(self.path)
        try:
            self._recover()
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            self._check_free()
        except BaseException:
            self._release()
            raise
        return self

    def reserve(self, num_bytes: int) -> None:
        """Raises OSError (ENOSPC) unless the file system has room for so many bytes now."""
        free = shutil.disk_usage(self.path).free
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
        if self.directory.exists():
            if any(self.directory.iterdir()):
                self._check_free()
                os.rename(self.directory, self._old)
            else:
                self.directory.rmdir()
        os.rename(self.path, self.directory)
        sync(self.directory.parent)
        if self._old.exists():
            shutil.rmtree(self._old)

    def _check_free(self) -> None:
        taken = self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir()))
        if taken and not (self._force and self.directory.is_dir()):
            raise ValueError(f"{self.directory} exists already; remove it or write to another directory")

    def _recover(self) -> None:
        """A writer killed between its two renames left the old directory under another name."""
        if self._old.exists():
            if self.directory.exists():
                shutil.rmtree(self._old)
            else:
                os.rename(self._old, self.directory)

    def _take(self, path: Path) -> int:
        path.mkdir(exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ValueError(
                f"another process is writing {self.directory} (it holds {path}); wait for it, or write elsewhere"
            ) from error
        except OSError as error:  # a network file system without locks
            log.info("%s cannot be locked (%s); do not write it twice at a time", path, error)
        return lock

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sync(path: Path) -> None:
    """fsync of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
