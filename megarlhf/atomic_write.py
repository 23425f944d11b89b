"""Files that appear complete or not at all, whatever kills their writer.

A file is written under a hidden name beside its own, synced, and renamed. What a killed writer leaves has a name that
`partial_name` gives; the next writer of the same file replaces it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def partial_name(name: str, writer: object = "") -> str:
    """Name under which a file, or a pattern of files, is written: `metrics.jsonl` -> `.metrics.jsonl.partial`.

    writer: tells apart those that may write one file at the same time, as a process id does
    """
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{writer}.partial" if writer else f"{folder}{slash}.{last}.partial"


@contextlib.contextmanager
def atomic_path(path: Path, *, synced: bool = True, writer: object = "") -> Iterator[Path]:
    """Give a hidden path to write to. It becomes `path` when the block ends well, and is removed when the block raises.

    Where the block leaves nothing there, `path` stays as it is. synced: the content is on the disk before the rename,
    so that a crash of the machine leaves the old file or the new one; without, it may leave an empty file
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
