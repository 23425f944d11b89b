"""Files that appear complete or not at all, even if their writer is killed.

A file is written under a hidden name in the same folder, synced, and renamed. A killed writer leaves a file with the
name `partial_name`, which the next writer of the same file replaces.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def partial_name(name: str, writer: object = "") -> str:
    """Name under which a file, or a pattern of files, is written: `metrics.jsonl` -> `.metrics.jsonl.partial`.

    writer: distinguishes processes that may write the same file at the same time, such as a process id
    """
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{writer}.partial" if writer else f"{folder}{slash}.{last}.partial"


@contextlib.contextmanager
def atomic_path(path: Path, *, synced: bool = True, writer: object = "") -> Iterator[Path]:
    """Give a hidden path to write to. It is renamed to `path` at the end of the block, or removed if the block raises.

    If the block writes nothing, `path` stays as it is.

    synced: the content is on the disk before the rename, so that a crash of the machine leaves the old file or the new
        one; without it, an empty file is possible
    """
    partial = path.with_name(partial_name(path.name, writer))
    try:
        yield partial
        if os.path.lexists(partial):
            if synced:
                sync(partial)
            os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def atomic_write(path: Path, content: str | bytes, *, synced: bool = True, writer: object = "") -> None:
    """Write a whole file; its folder must be there. Arguments as for `atomic_path`. Raises: OSError."""
    with atomic_path(path, synced=synced, writer=writer) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
