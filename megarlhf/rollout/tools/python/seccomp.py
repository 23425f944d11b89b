"""Seccomp: the system calls that the calling process may make from now on.

The list has what an interpreter needs for computing, threads, and files. What is left out, and why:

- fork, exec: a single process can be watched and ended without a race
- socket, connect, bind: network, and sockets of other programs
- kill, ptrace, process_vm_*, pidfd_*, prlimit of others, F_SETOWN: other processes
- chmod, chown, utime, setxattr, truncate by path: Landlock does not restrict them
- memfd_create, shmget, msgget, semget, mq_open, keyctl, pipes' sizes: memory that no limit counts, or that stays
- mkdir, symlink, link, mknod: the call's folder stays flat, so that it is quickly counted and surely removed
- mount, unshare, bpf, io_uring, userfaultfd, perf_event_open, and all that is new: attacks on the kernel
"""

from __future__ import annotations

import ctypes
import os
import struct

from megarlhf.rollout.tools.python.kernel import syscall

_FREE = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
futex 202 98, openat 257 56, newfstatat 262 79, statx 332 291, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, sendfile 40 71, copy_file_range 326 285, sched_yield 24 124, mremap 25 216,
msync 26 227, mincore 27 232, madvise 28 233, membarrier 324 283, rseq 334 293, set_robust_list 273 99,
set_tid_address 218 96, sigaltstack 131 132, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
restart_syscall 219 128, exit 60 93, exit_group 231 94, wait4 61 260, gettid 186 178, getpid 39 172, getppid 110 173,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getresuid 118 148, getresgid 120 150, getpgid 121 155,
getsid 124 156, getgroups 115 158, uname 63 160, sysinfo 99 179, times 100 153, getrusage 98 165, getcpu 309 168,
sched_getaffinity 204 123, getrandom 318 278, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101, gettimeofday 96 169, getitimer 36 102, setitimer 38 103, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, dup 32 23, dup3 292 24, pipe2 293 59, eventfd2 290 19,
epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441, pselect6 270 72, ppoll 271 73,
close_range 436 436, recvfrom 45 207, recvmsg 47 212, shutdown 48 210, getsockname 51 204, getpeername 52 205,
getsockopt 55 209, flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, fadvise64 221 223, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, renameat 264 38, renameat2 316 276, unlinkat 263 35, readlinkat 267 78,
umask 95 166, faccessat 269 48, faccessat2 439 439, statfs 137 43, fstatfs 138 44, open 2 -, stat 4 -, lstat 6 -,
poll 7 -, access 21 -, pipe 22 -, select 23 -, dup2 33 -, pause 34 -, alarm 37 -, getdents 78 -, rename 82 -,
creat 85 -, unlink 87 -, readlink 89 -, getrlimit 97 163, getpgrp 111 -, time 201 -, epoll_create 213 -,
epoll_wait 232 -, eventfd 284 -
"""
"""Calls that are always allowed, each with its number on x86_64 and on aarch64."""

_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_FIRST_NEW = 424
"""Number from which on C libraries try a call and use an older one if the kernel does not know it, as with clone3."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Column in the lists of calls, the kernel's code, and the number of the call `seccomp`."""


_Check = tuple[int, int, tuple[int, ...]]
"""Offset of half an argument of a call, a mask, and the values that are allowed under it."""


def _low(argument: int, *values: int, mask: int = 0xFFFFFFFF) -> _Check:
    return 16 + 8 * argument, mask, values


def _conditional() -> list[tuple[tuple[int, int], list[_Check]]]:
    """Numbers of calls that are allowed with certain arguments only."""
    own = os.getpid()
    thread_flags = (0x3D0F00, 0x7D0F00)  # of pthread_create in glibc and in musl
    fcntl_commands = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # dup, flags, locks, F_GETPIPE_SZ
    ioctl_commands = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal; readable bytes; flags
    return [
        ((56, 220), [_low(0, *thread_flags)]),  # clone
        ((62, 129), [_low(0, own)]),  # kill
        ((234, 131), [_low(0, own)]),  # tgkill
        ((302, 261), [_low(0, 0, own)]),  # prlimit64
        ((72, 25), [_low(1, *fcntl_commands)]),
        ((16, 29), [_low(1, *ioctl_commands)]),
        ((157, 167), [_low(0, 15, 16)]),  # prctl: a thread's name
        ((53, 199), [_low(0, 1), _low(1, 1, mask=0xF)]),  # socketpair: AF_UNIX, SOCK_STREAM, for asyncio
        ((44, 206), [_low(4, 0), (16 + 8 * 4 + 4, 0xFFFFFFFF, (0,))]),  # sendto without an address
    ]


def has_seccomp() -> bool:
    """Whether this architecture and kernel have filters."""
    machine = os.uname().machine
    try:
        return machine in _ARCHITECTURES and not syscall(_ARCHITECTURES[machine][2], 2, 0, struct.pack("=I", _KILL))
    except OSError:
        return False


def restrict_calls() -> None:
    """Allow the calls of this module only; others fail with EPERM. The process must have no_new_privs.

    Raises: OSError.
    """
    column, code, number = _ARCHITECTURES[os.uname().machine]
    program = [
        *((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, code), (_RETURN, 0, 0, _KILL)),  # programs of another architecture
        (_LOAD, 0, 0, 0),
    ]
    for entry in _FREE.replace("\n", " ").split(","):
        if (free := entry.split()[1 + column]) != "-":
            program += [(_EQUAL, 0, 1, int(free)), (_RETURN, 0, 0, _ALLOW)]
    for numbers, checks in _conditional():
        block = [step for check in checks for step in _steps(check)] + [(_RETURN, 0, 0, _ALLOW)]
        program += [(_EQUAL, 0, len(block), numbers[column]), *block]
    program += [(_AT_LEAST, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    _install(number, b"".join(struct.pack("=HBBI", *step) for step in program))


def _steps(check: _Check) -> list[tuple[int, int, int, int]]:
    """Instructions that return EPERM unless the check holds."""
    offset, mask, values = check
    steps = [(_LOAD, 0, 0, offset), (_AND, 0, 0, mask)]
    steps += [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*steps, (_RETURN, 0, 0, _EPERM)]


def _install(number: int, program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    syscall(number, 1, 0, struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
