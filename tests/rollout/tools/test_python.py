"""Attempts of a model's code to break out of the Python tool: what the model sees, and that nothing is left.

Not covered: a system that lacks Landlock or seccomp (`test_python_use.py` switches seccomp off), and aarch64.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megarlhf.rollout.tools.python.limits import PythonLimits
from megarlhf.rollout.tools.python.tool import missing_protection
from tests.rollout.tools.python_calls import SECRET, call
from tests.rollout.tools.python_calls import run_folder as run_folder

pytestmark = pytest.mark.skipif(bool(missing_protection()), reason="Landlock or seccomp is missing")

DENIED = r"PermissionError: \[Errno 1\]"  # by seccomp
CLOSED = r"PermissionError: \[Errno 13\]"  # by Landlock
C = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ATTEMPTS = {
    "endless fork": ("import os\nwhile True: os.fork()", DENIED),
    "a program": ("import subprocess\nsubprocess.run(['/bin/true'])", DENIED),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", CLOSED + "|" + DENIED),
    "a pool of processes": ("import concurrent.futures as f\nf.ProcessPoolExecutor(2)", "PermissionError"),
    "daemon": ("import os\nos.setsid()", DENIED),
    "10 GB": ("x = bytearray(10 ** 10)", "ToolError: The code used more memory than the limit of 512 MB"),
    "10 GB little by little": (
        "x = []\nwhile True: x.append(bytearray(10 ** 6))",
        "ToolError: The code used more memory",
    ),
    "threads": (
        (
            "import threading, time\n"
            "for _ in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
            "time.sleep(9)"
        ),
        "ToolError: The code started more threads or processes than the limit of 16|can't start new thread",
    ),
    "TCP": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", DENIED),
    "UDP": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", DENIED),
    "Unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", DENIED),
    "Unix datagram pair": ("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", DENIED),
    "netlink": ("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", DENIED),
    "DNS": ("import socket\nsocket.getaddrinfo('localhost.', 80)", "gaierror|PermissionError"),
    "read passwd": ("open('/etc/passwd').read()", CLOSED),
    "read home": ("import os\nos.listdir('{home}')", CLOSED),
    "read run": ("open('{run}/secret').read()", CLOSED),
    "read the package": ("import megarlhf", "ModuleNotFoundError"),
    "environment of guard": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", CLOSED),
    "environment of worker": ("open('/proc/{worker}/environ').read()", CLOSED),
    "memory of guard": ("import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')", CLOSED),
    "own environment": ("import os\nprint(dict(os.environ))", "'PATH'"),
    "write above": ("open('../x', 'w')", CLOSED),
    "write to tmp": ("open('/tmp/x-of-a-model', 'w')", CLOSED),
    "write to run": ("open('{run}/secret', 'w')", CLOSED),
    "symbolic link": ("import os\nos.symlink('{run}/secret', 'x')", DENIED + "|" + CLOSED),
    "hard link": ("import os\nos.link('{run}/secret', 'x')", DENIED + "|" + CLOSED),
    "rename out": (
        "import os\nopen('x', 'w').close()\nos.rename('x', '{run}/x')",
        "PermissionError|cross-device|Errno 18",
    ),
    "remove": ("import os\nos.remove('{run}/secret')", CLOSED),
    "chmod": ("import os\nos.chmod('{run}/secret', 0o777)", DENIED),
    "truncate": ("import os\nos.truncate('{run}/secret', 0)", DENIED),
    "times": ("import os\nos.utime('{run}/secret', (0, 0))", DENIED),
    "folders": ("import os\nos.mkdir('x')", DENIED),
    "kill guard": ("import os\nos.kill(os.getppid(), 9)", DENIED),
    "kill worker": ("import os\nos.kill({worker}, 9)", DENIED),
    "kill all": ("import os\nos.kill(-1, 9)", DENIED),
    "kill group": ("import os\nos.killpg({worker_group}, 9)", DENIED),
    "kill own group": ("import os\nos.kill(0, 9)", DENIED),
    "limits of worker": ("import resource\nresource.prlimit({worker}, resource.RLIMIT_CPU, (1, 1))", DENIED),
    "raise limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (999, 999))",
        "ValueError|Permission",
    ),
    "owner of a pipe": ("import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {worker})", DENIED),
    "ptrace": (C + "libc.ptrace(16, os.getppid(), 0, 0), ctypes.get_errno()", r"\(-1, 1\)"),
    "outlive the guard": (C + "libc.prctl(1, 0), ctypes.get_errno()", r"\(-1, 1\)"),
    "user namespace": (C + "libc.unshare(0x10000000), ctypes.get_errno()", r"\(-1, 1\)"),
    "io_uring": (C + "libc.syscall(425, 1, 0), ctypes.get_errno()", r"\(-1, 38\)"),
    "other architecture": (C + "libc.syscall(0x40000000 + 39), ctypes.get_errno()", r"\(-1, 38\)"),
    "SysV memory": (C + "libc.shmget(7, 4096, 0o1777), ctypes.get_errno()", r"\(-1, 1\)"),
    "POSIX memory": ("from multiprocessing.shared_memory import SharedMemory\nSharedMemory('x', True, 99)", CLOSED),
    "memfd": ("import os\nos.memfd_create('x')", DENIED),
    "large pipe": ("import fcntl, os\nfcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", DENIED),
    "priority": ("import os\nos.setpriority(os.PRIO_PROCESS, 0, -20)", DENIED),
    "endless loop": ("while True: pass", "ToolError: The code ran longer than the time limit of 0.5 s"),
    "ignore signals": (
        (
            "import signal, time\nfor s in set(signal.valid_signals()) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
            "print('deaf', flush=True)\ntime.sleep(99)"
        ),
        "(?s)ToolError: The code ran longer than the time limit of 0.5 s.*deaf",
    ),
    "stop itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "time limit of 0.5 s"),
    "endless output": ("while True: print('x' * 999)", "ToolError: The code printed more than 20000000 bytes"),
    "10 000 files": ("for i in range(10 ** 5): open(str(i), 'w').close()", "ToolError: The code made more files than"),
    "large sparse file": ("open('x', 'wb').truncate(10 ** 10)", "OSError: .Errno 27. File too large"),
    "large file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(10 ** 6))", "File too large"),
    "removed files": (
        (
            "import os\nfs = []\nwhile True:\n"
            " f = open('x', 'wb'); f.write(bytes(5 * 10 ** 6)); fs.append(f); os.remove('x')"
        ),
        "ToolError: The code wrote more to files than the limit of 16 MB",
    ),
    "removed files that stay mapped": (
        (
            "import os, mmap\nmaps = []\nfor i in range(40):\n"
            " f = open('x', 'wb+'); f.write(bytes(5 * 10 ** 6)); f.flush()\n"
            " maps.append(mmap.mmap(f.fileno(), 0)); f.close(); os.remove('x')"
        ),
        "ToolError: The code wrote more to files than the limit of 16 MB",
    ),
    "removed files that are mapped and closed": (
        (
            "import os, ctypes, time\nc = ctypes.CDLL(None); c.mmap.restype = ctypes.c_void_p\nwhile True:\n"
            " f = open('x', 'wb+'); f.write(bytes(5 * 10 ** 6)); f.flush()\n"
            " c.mmap(None, ctypes.c_size_t(4096), 1, 1, f.fileno(), ctypes.c_long(0)); f.close(); os.remove('x')"
        ),
        "ToolError: The code closed and removed a file that it had mapped",
    ),
    "segfault": ("import ctypes\nctypes.string_at(0)", r"ToolError: The code crashed: .* signal 11 \(SIGSEGV\)"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "end at once": ("import os\nprint(1)\nos._exit(3)", r"\A1\n\(exit status 3\)\Z"),
    "close output": ("import os\nprint(1)\nos.close(1); os.close(2)", r"\A1\b"),
    "close stream": ("import sys\nprint(1)\nsys.stdout.close()\n1 / 0", "(?s)1.*ZeroDivisionError"),
    "inherited files": (
        (
            "import os\nopened = []\nfor fd in range(3, 128):\n"
            " try: os.write(fd, b'x'); opened.append(fd)\n except OSError: pass\nopened"
        ),
        r"\A\[\]\Z",
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt(name: str, run_folder: Path) -> None:
    """The fixture checks that no process, file or shared memory is left, and that the run's secret is unchanged."""
    code, expected = ATTEMPTS[name]
    names = {"run": run_folder, "home": Path.home(), "worker": os.getpid(), "worker_group": os.getpgrp()}
    for key, value in names.items():
        code = code.replace(f"{{{key}}}", str(value))
    seen = call(code, PythonLimits(seconds=0.5 if "0.5 s" in expected else 5.0))
    assert re.search(expected, seen), seen
    assert SECRET not in seen
