"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def prctl(option: int, value: int) -> None:
    """Raises: OSError."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def syscall(number: int, *args: int | bytes | None) -> int:
    """Result of a system call. An argument that is bytes is passed as a pointer to a copy. Raises: OSError."""
    words = [ctypes.c_long(arg) if isinstance(arg, int) else ctypes.create_string_buffer(arg) if arg else None
             for arg in args]  # fmt: skip
    return _check(_libc.syscall(ctypes.c_long(number), *words))


def drop_capabilities() -> None:
    """Give up root's special rights. Raises: OSError."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
