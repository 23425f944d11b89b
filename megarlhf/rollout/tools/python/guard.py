"""The guard of a call: it forks the child that runs the code, watches it, and writes the answer to standard output.

Its standard input is a pipe: first a request comes, then the pipe's end means that the answer is no longer wanted. Only
the standard library is imported, and little of it, because a guard is started for each call.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import resource
import select
import signal
import time

from megarlhf.rollout.tools.python import kernel
from megarlhf.rollout.tools.python.child import OUT_OF_MEMORY, run_child
from megarlhf.rollout.tools.python.output import Output
from megarlhf.rollout.tools.python.usage import descendants, folder_use, hidden_files, process_use

TYPE_CHECKING = False  # typing takes longer to import than all of this module
if TYPE_CHECKING:
    from megarlhf.rollout.tools.python.request import GuardRequest


FOLDER_PREFIX = "megarlhf-python-"
_TICK_SECONDS = 0.02
"""Interval at which the use of memory, threads, and files is looked up."""
_END_SECONDS = 5.0
"""Time after which processes are given up that SIGKILL does not end."""


def main() -> int:
    """Answer one request. Returns in the child as well, with its exit status, so that its interpreter ends as usual."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those of a job must not end the guard
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    request = _read_request()
    if request is None or os.getppid() != request["parent"]:
        return 0
    folder = os.path.join(request["base"], f"{FOLDER_PREFIX}{os.getpid()}-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # shows that the folder has a living owner
    guard, output, ready = os.getpid(), os.pipe(), os.pipe()
    if not (child := os.fork()):
        return run_child(request, guard, folder, output[1], ready[1])
    os.close(output[1])
    os.close(ready[1])
    try:
        answer = _watch(child, request, folder, output[0], ready[0])
    finally:
        end_processes()
        _remove(folder)
    with open(1, "wb") as file:
        marshal.dump(answer, file)
    os._exit(0)


def _read_request() -> GuardRequest | None:
    """The request: its length in eight bytes, then the bytes. None if the pipe ends before."""
    data = b""
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        if not (more := os.read(0, 1 << 16)):
            return None
        data += more
    request: GuardRequest = marshal.loads(data[8:])
    return request


def _watch(child: int, request: GuardRequest, folder: str, output_fd: int, ready_fd: int) -> tuple[str, str | None]:
    """Wait for the child's end, or end it. Returns its output, and why it failed if it did."""
    limits, output = request["limits"], Output(output_fd, int(request["limits"]["output_bytes"]))
    if not os.read(ready_fd, 1):
        end_processes()
        output.read_rest()
        raise RuntimeError(f"the code's process could not be isolated: {output.text()}")
    until = time.monotonic() + limits["seconds"]
    wait = select.poll()
    wait.register(0, 0)  # the pipe's end is always reported
    wait.register(output_fd, select.POLLIN)
    with contextlib.suppress(OSError):  # an old kernel: the end is seen a tick later
        wait.register(os.pidfd_open(child), select.POLLIN)
    next_look, why = 0.0, None
    while why is None and (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        events = dict(wait.poll(_TICK_SECONDS * 1000))
        if events.pop(0, None) or signal.SIGTERM in signal.sigpending():
            why = "is no longer wanted"
        if output_fd in events and not output.read():
            wait.unregister(output_fd)
        if why is None and time.monotonic() >= next_look:
            next_look = time.monotonic() + _TICK_SECONDS
            why = _excess(child, request, folder, output.length, time.monotonic() >= until)
    if why is None:
        why, note = _ending(os.waitstatus_to_exitcode(ended[1]), limits)
        output.note = note
    else:
        os.kill(child, signal.SIGKILL)
    end_processes()  # they may hold the pipe open
    output.read_rest()
    return output.text(), why


def _excess(child: int, request: GuardRequest, folder: str, printed: int, late: bool) -> str | None:
    """Limit that the code exceeds, in words; None if there is none."""
    limits = request["limits"]
    pids = [child] if "seccomp" in request["protections"] else descendants(os.getpid())
    threads, memory = process_use(pids)
    files, file_size = folder_use(folder, pids)
    if late:
        return f"ran longer than the time limit of {limits['seconds']:g} s"
    if threads > limits["processes"]:
        return f"started more threads or processes than the limit of {limits['processes']}"
    if memory > int(limits["memory_mb"]) << 20:
        return f"used more memory than the limit of {limits['memory_mb']} MB"
    if files > limits["files"]:
        return f"made more files than the limit of {limits['files']}"
    if file_size > int(limits["file_mb"]) << 20:
        return f"wrote more to files than the limit of {limits['file_mb']} MB"
    if hidden_files(folder, pids):
        return "closed and removed a file that it had mapped, whose size nothing tells"
    if printed > 1000 * limits["output_bytes"]:
        return f"printed more than {1000 * int(limits['output_bytes'])} bytes"
    return None


def _ending(code: int, limits: dict[str, float]) -> tuple[str | None, str]:
    """Why the code failed, if it did, and a note for the model about its exit status."""
    if code == OUT_OF_MEMORY:
        return f"used more memory than the limit of {limits['memory_mb']} MB", ""
    if code == -signal.SIGXCPU:
        return f"used more processor time than the time limit of {limits['seconds']:g} s allows", ""
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), "unknown")
        return f"crashed: its process was ended by signal {-code} ({name})", ""
    return None, f"(exit status {code})" if code else ""


def end_processes() -> None:
    """End every process that is left, and wait for it. Orphans have become children of this process."""
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _remove(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:  # with Landlock or seccomp there are no folders in it
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
