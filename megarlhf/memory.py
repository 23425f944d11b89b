"""Memory that is available to this process, by the machine and by the process's control groups; and the heap.

Containers and batch systems set limits by control groups. The limit of a group holds for all groups below it. Linux
shows them as files, in one tree (version 2), in a tree for memory alone (version 1), or in both. psutil does not read
them.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Version(NamedTuple):
    """Names in one version of the interface."""

    filesystem: str
    controller: str
    """Name in /proc/self/cgroup; the one tree of version 2 is listed without controllers."""
    limit: str
    usage: str
    reclaimable: str
    """Name in memory.stat for file pages that were not used lately, of the group and all below it."""


_VERSIONS = (
    _Version("cgroup2", "", "memory.max", "memory.current", "inactive_file"),
    _Version("cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that processes here can still allocate: the least of the machine's and of each control group's.

    Reclaimable page cache counts as available: for the machine the kernel's own estimate, for a group the file pages
    that were not used lately. `root` is the folder of proc and the mounts.
    """
    machine = _table(root / "proc/meminfo")["MemAvailable:"] * 1024
    by_group = [_below_limit(version, group) for version in _VERSIONS for group in _groups(version, root)]
    return min([machine, *(num_bytes for num_bytes in by_group if num_bytes is not None)])


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """The most memory that this process has had resident. `getrusage` would also count the process before `exec`."""
    lines = [line.split() for line in _lines(root / "proc/self/status")]
    return next((int(line[1]) * 1024 for line in lines if line[0] == "VmHWM:"), 0)


def _below_limit(version: _Version, group: Path) -> int | None:
    """Bytes below the group's limit; None without a limit, as for the topmost group or one without this controller."""
    try:
        limit = (group / version.limit).read_text().strip()
        used = int((group / version.usage).read_text()) - _table(group / "memory.stat")[version.reclaimable]
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _groups(version: _Version, root: Path) -> Iterator[Path]:
    """This process's group and the groups above it, as far up as the mount shows."""
    # `4:memory:/path` of version 1, `0::/path` of version 2.
    memberships = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    own = [PurePosixPath(path) for _, names, path in memberships if version.controller in names.split(",")]
    # `35 32 0:29 /shown /mount rw shared:5 - cgroup cgroup rw,memory`; before the dash are optional fields.
    for before, _, after in (line.partition(" - ") for line in _lines(root / "proc/self/mountinfo")):
        shown, mount = before.split(" ")[3:5]
        filesystem, _, options = after.split(" ", 2)
        if own and filesystem == version.filesystem and version.controller in ("", *options.split(",")):
            # A container may show a part of the tree without the process's place in it. Then its top holds.
            inside = own[0].is_relative_to(shown) and ".." not in own[0].parts
            group = own[0].relative_to(shown) if inside else PurePosixPath()
            yield from (root / mount.lstrip("/") / path for path in (group, *group.parents))
            return


def _lines(path: Path) -> list[str]:
    """Lines of a file; none if it is missing, as in a kernel without control groups."""
    return path.read_text().splitlines() if path.exists() else []


def _table(path: Path) -> dict[str, int]:
    """Numbers by name from a file with `name number` in each line, such as meminfo and memory.stat."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}


def trim_heap() -> None:
    """Give what is free inside the C library's heap back to the system, where the library can (glibc).

    A run allocates and frees texts and lists of many sizes, and the gaps between those that stay grow for thousands of
    steps, though no more is in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
