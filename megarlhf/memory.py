"""How much memory this machine and the control groups of this process leave it.

Containers and batch systems set limits by control groups, and the limit of a group holds for all groups below it.
Linux shows them as files, in one tree (version 2), in a tree for memory alone (version 1), or in both.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; proc_pid_mountinfo(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class _Version:
    """What a version of the interface calls things."""

    filesystem: str
    controller: str
    """In the lines of /proc/self/cgroup; the one tree of version 2 is listed without controllers."""
    limit: str
    usage: str
    reclaimable: str
    """In memory.stat, of the group and all below it: file pages that were not used lately."""


_VERSIONS = (
    _Version("cgroup2", "", "memory.max", "memory.current", "inactive_file"),
    _Version("cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that processes here can still allocate: the least of what the machine has and what any limit leaves.

    Page cache that can be given up counts as available: the kernel's own estimate for the machine, in a group the
    file pages that were not used lately. `root` is where proc and the mounts are found.
    """
    machine = _table(root / "proc/meminfo")["MemAvailable:"] * 1024
    left = [_left(version, group) for version in _VERSIONS for group in _groups(version, root)]
    return min([machine, *(number for number in left if number is not None)])


def _left(version: _Version, group: Path) -> int | None:
    """Bytes below the group's limit; None where it shows none, as the topmost group or one without this controller."""
    try:
        limit = (group / version.limit).read_text().strip()
        used = int((group / version.usage).read_text()) - _table(group / "memory.stat")[version.reclaimable]
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _groups(version: _Version, root: Path) -> Iterator[Path]:
    """This process' group and those above it, as far up as the mount shows."""
    own = _own_group(version, root)
    mount = _mount(version, root)
    if own is None or mount is None:
        return
    shown, point = mount
    # A container may show a part of the tree without saying where in it the process stands: the part's top then holds.
    inside = own.relative_to(shown) if own.is_relative_to(shown) and ".." not in own.parts else PurePosixPath()
    for group in (inside, *inside.parents):
        yield point / group


def _own_group(version: _Version, root: Path) -> PurePosixPath | None:
    """`4:memory:/path` of version 1, `0::/path` of version 2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if version.controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _mount(version: _Version, root: Path) -> tuple[PurePosixPath, Path] | None:
    """Which group stands at the mount's top, and where it is mounted.

    `35 32 0:29 /shown /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory`; the number of optional fields
    before the dash differs.
    """
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        shown, point = left.split(" ")[3:5]
        filesystem, _, options = right.split(" ", 2)
        if filesystem == version.filesystem and (not version.controller or version.controller in options.split(",")):
            return PurePosixPath(shown), root / point.lstrip("/")
    return None


def _lines(path: Path) -> list[str]:
    """Empty where the file is missing: a kernel without control groups."""
    return path.read_text().splitlines() if path.exists() else []


def _table(path: Path) -> dict[str, int]:
    """`name number` a line, as meminfo and memory.stat are written."""
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
