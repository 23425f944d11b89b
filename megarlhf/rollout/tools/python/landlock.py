"""Landlock: which files the calling process may open from now on.

Landlock does not hide that a file exists (stat), nor does it forbid to change its mode; `seccomp.py` forbids the
latter. Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from megarlhf.rollout.tools.python.kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE
_PATH_BENEATH = 1
_FILE_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights for files that the kernel knows since a version of its interface."""


def landlock_version() -> int:
    """Version of the kernel's interface; 0 if there is none."""
    try:
        return syscall(_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict_files(read: Iterable[str], write: Iterable[str], folder: str) -> None:
    """Let the process read what is beneath `read`, also write to the files `write`, and in `folder` also make and
    remove files, but not folders or links. Also forbid TCP, and signals and abstract sockets to other processes, where
    the kernel can.

    Raises: OSError.
    """
    version = landlock_version()
    known = (1 << max(bits for since, bits in _FILE_RIGHTS_OF_ABI.items() if since <= version)) - 1
    tcp, scopes = 3 if version >= 4 else 0, 3 if version >= 6 else 0
    rules = syscall(_CREATE_RULESET, struct.pack("=QQQ", known, tcp, scopes), 24, 0)
    rights = dict.fromkeys(read, _READ_FILE | _READ_DIR)
    rights |= dict.fromkeys(write, _FILE_RIGHTS)
    rights[folder] = _FILE_RIGHTS | _READ_DIR | _REMOVE_FILE | _MAKE_REG
    for path, right in rights.items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # not every system has every folder of libraries
            continue
        if not os.path.isdir(path):
            right &= _FILE_RIGHTS
        syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", right & known, fd), 0)
        os.close(fd)
    # Since version 7, what is denied is written to the system's audit log, unless this flag is set.
    syscall(_RESTRICT_SELF, rules, 1 if version >= 7 else 0)
    os.close(rules)
