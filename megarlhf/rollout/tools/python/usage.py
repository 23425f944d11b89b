"""Memory, threads and files that processes and a folder use, as /proc and the folder say.

Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(ancestor: int) -> list[int]:
    """Process ids of children, their children, and so on, without those that have ended. Read from /proc/PID/stat,
    because not every kernel has /proc/PID/task/PID/children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(int(name))) and fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(name))
    reached = [ancestor]
    for pid in reached:  # grows meanwhile
        reached += children.get(pid, [])
    return reached[1:]


def process_use(pids: Iterable[int]) -> tuple[int, int]:
    """Number of threads of processes, and bytes that they have in memory."""
    used = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(fields[17]) for fields in used), sum(int(fields[21]) for fields in used) * _PAGE


def folder_use(folder: str, pids: Iterable[int]) -> tuple[int, int]:
    """Number of entries of a folder, and bytes of its files and of those that are removed but still open."""
    entries = [info for name in os.listdir(folder) if (info := _info(os.path.join(folder, name)))]
    for pid in pids:
        try:
            open_files = os.listdir(f"/proc/{pid}/fd")
        except OSError:  # it has just ended
            continue
        infos = (_info(f"/proc/{pid}/fd/{name}", follow=True) for name in open_files)
        entries += [info for info in infos if info and stat.S_ISREG(info.st_mode) and not info.st_nlink]
    return len(entries), sum(max(info.st_size, info.st_blocks * 512) for info in entries)


def hidden_files(folder: str, pids: Iterable[int]) -> int:
    """Number of a folder's files that are removed and not open, but mapped. Nothing tells their sizes."""
    count, name = 0, os.path.basename(folder)
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as maps:
                mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if line.endswith("(deleted)\n")}
        except OSError:
            continue
        if mapped := {path for path in mapped if f"/{name}/" in path}:
            count += len(mapped - _open_files(pid))
    return count


def _open_files(pid: int) -> set[str]:
    """Paths of a process's open files."""
    paths = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return paths


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the third (state) on; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _info(path: str, follow: bool = False) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError:
        return None
