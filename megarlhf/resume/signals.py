"""Requests to stop a run: a signal, or the end of its Slurm job's time.

A signal is noted at once, also while the main thread waits in a collective or a kernel: Python writes its number to a
pipe, and a thread reads it there. A Python handler in the main thread would have to wait until that call returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from signal import Signals
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # torch takes seconds to import, and the command line needs `StopRun` only
    import torch
    import torch.distributed as dist

STOP_SIGNALS = (Signals.SIGUSR1, Signals.SIGHUP, Signals.SIGTERM, Signals.SIGINT)
"""Signals that ask a run to save and stop, the more urgent later. SIGHUP comes from a closed terminal."""
AT_ONCE = (Signals.SIGTERM, Signals.SIGINT)
"""A second one of these ends the process at once."""
REPEAT_SECONDS = 1.0
"""One Ctrl-C may arrive several times: from the terminal, and forwarded by srun. Repeats within this are ignored."""
LAST_WORDS_SECONDS = 0.5
"""Time after SIGHUP in which the reader of a pipe, started in the same terminal, may end."""
END_SECONDS = 2.0
"""Time in which the main thread may end the process by itself when it is told to stop at once."""

KEEP_EARLY = frozenset({"sft", "rm", "dpo", "rl"})
"""Commands that call `note_early` before anything else."""
_early: list[Signals] = []

TO_BE_QUEUED_AGAIN = 75
INTERRUPTED = 130


class StopRun(Exception):
    """The run has saved what it has done, on all ranks, and leaves. The message says what was saved and how to go on.

    Raised on every rank alike, at a boundary. `number`: the signal that asked for it; None when time is nearly over.
    """

    def __init__(self, message: str, number: Signals | None = None) -> None:
        super().__init__(message)
        self.number = number

    @property
    def status(self) -> int:
        """Exit status: 130 after Ctrl-C, otherwise 75, to be queued again."""
        return INTERRUPTED if self.number == Signals.SIGINT else TO_BE_QUEUED_AGAIN


class Repeats:
    """Tells a second request to stop from an echo of the first. Not thread-safe."""

    def __init__(self) -> None:
        self._last: float | None = None

    def kind(self, number: Signals, now: float) -> Literal["first", "echo", "second"]:
        """Classify the signal `number`, received at `now` (monotonic seconds). SIGUSR1 is always a first one, and so is
        SIGTERM after it: Slurm sends the one some time before the other."""
        if number not in AT_ONCE:
            return "first"
        if self._last is not None and now - self._last < REPEAT_SECONDS:
            return "echo"
        kind: Literal["first", "second"] = "first" if self._last is None else "second"
        self._last = now
        return kind


class StopRequest:
    """Takes the signals of `STOP_SIGNALS` while the `with` block runs, in the main thread of a rank.

        with StopRequest(device=runtime.device, announces=runtime.is_main) as stop:
            ...
            if (number := stop.agreed()) is not None:

    The first signal is noted, and the rank that `announces` names it. A second SIGINT or SIGTERM stops at once: SIGINT
    as Python does (KeyboardInterrupt, status 130), SIGTERM with status 143. A forked child does not take part: there
    the signals do what they do by default.
    """

    def __init__(self, *, device: torch.device | None = None, announces: bool = True) -> None:
        self._device, self._announces = device, announces
        self._noted: Signals | None = None
        self._repeats = Repeats()
        self._handlers: dict[Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._ends_now = False
        self._left = threading.Event()
        self._forking = threading.local()

    def __enter__(self) -> StopRequest:
        assert self._pipe is None, "entered twice"
        self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._in_main_thread) for number in heard_signals()}
        # A child by fork has the pipe too: a signal that ends a worker would count as one to this process.
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._leave_to_default)
        for number in early():
            self._receive(number)
        self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="megarlhf-stop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._pipe is not None
        self._left.set()
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        pipe, self._pipe = self._pipe, None
        os.close(pipe[1])
        assert self._thread is not None
        self._thread.join()
        os.close(pipe[0])

    def requested(self) -> Signals | None:
        """The most urgent signal that this process has received."""
        return self._noted

    def agreed(self, group: dist.ProcessGroup | None = None) -> Signals | None:
        """The most urgent signal that any rank of the group has received: the same answer on all. Collective."""
        import torch
        import torch.distributed as dist

        own = self.requested()
        urgency = torch.tensor([0 if own is None else 1 + STOP_SIGNALS.index(own)], device=self._device)
        if dist.is_initialized():
            dist.all_reduce(urgency, op=dist.ReduceOp.MAX, group=group)
        return (None, *STOP_SIGNALS)[int(urgency)]

    def _listen(self, pipe: int) -> None:
        while received := os.read(pipe, 64):
            for byte in received:
                with contextlib.suppress(ValueError):  # a signal that Python does not know
                    if (number := Signals(byte)) in STOP_SIGNALS:
                        self._receive(number)

    def _receive(self, number: Signals) -> None:
        kind = self._repeats.kind(number, time.monotonic())
        if number == Signals.SIGHUP:
            leave_terminal()
        if kind == "second":
            self._end_at_once(number)
        own = self.requested()
        if own is not None and STOP_SIGNALS.index(own) >= STOP_SIGNALS.index(number):
            return  # the same, or nothing new
        self._noted = number
        if self._announces:
            _say(f"{number.name}: saving at the next moment between two updates, then this run ends. Again: at once")

    def _end_at_once(self, number: Signals) -> None:
        """The main thread may be inside a call that does not return."""
        if number == Signals.SIGINT:
            self._ends_now = True
            signal.pthread_kill(threading.main_thread().ident or 0, Signals.SIGINT)
            if self._left.wait(END_SECONDS):
                return  # by itself
        elif self._announces:
            _say(f"{number.name} again: stopped at once")
        os._exit(128 + number)

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self._ends_now:
            self._ends_now = False
            raise KeyboardInterrupt

    def _hold(self) -> None:
        """Block signals before a fork, until the child's handlers are back to the default."""
        if self._pipe is not None:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _let_go(self) -> None:
        if (mask := self._forking.__dict__.pop("mask", None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _leave_to_default(self) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for number in self._handlers:
                signal.signal(number, signal.SIG_DFL)
        self._let_go()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started inside get a SIGUSR1 when they have called `note_early`, and not before: it would end
    them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {Signals.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def note_early() -> None:
    """Keep a SIGUSR1 for who asks `early`: importing torch takes seconds, and it would end the process."""
    signal.signal(Signals.SIGUSR1, lambda number, frame: _early.append(Signals(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {Signals.SIGUSR1})


def early() -> list[Signals]:
    """Take the signals that `note_early` has kept."""
    received = _early[:]
    _early.clear()
    return received


def heard_signals() -> list[Signals]:
    """`STOP_SIGNALS`, but for a SIGHUP that is ignored, as under nohup."""
    is_ignored = signal.getsignal(Signals.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != Signals.SIGHUP or not is_ignored]


def leave_terminal() -> None:
    """Send output to /dev/null after SIGHUP, where the terminal or the reader of a pipe is gone: writing there would
    fail."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            if _has_no_reader(output):
                os.dup2(nowhere, output)
        os.close(nowhere)


def _has_no_reader(output: int) -> bool:
    mode = os.fstat(output).st_mode
    if stat.S_ISFIFO(mode):
        waiting = select.poll()
        waiting.register(output, 0)  # errors are always reported
        return bool(waiting.poll(1000 * LAST_WORDS_SECONDS))
    return stat.S_ISCHR(mode) and not os.isatty(output)


def ignore_stop_signals() -> None:
    """Ignore signals after a run has saved, while its ranks leave: a launcher that sees the first rank leave may end
    the others, whose status would then be that of the signal."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _say(sentence: str) -> None:
    """Print without Python's buffers, to which the main thread may be writing."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nmegarlhf: {sentence}\n".encode())


def time_left() -> float | None:
    """Seconds that this Slurm job still has; None outside Slurm, without a limit, and where Slurm does not say.

    For one rank: Slurm is asked where its variables do not say (before 22.05), once.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and int(end) > 0:
        return int(end) - time.time()
    at = _end_of_job(job)
    return None if at is None else at - time.monotonic()


@functools.cache
def _end_of_job(job: str) -> float | None:
    """End of the job on this machine's monotonic clock."""
    now = time.monotonic()
    try:
        command = ["squeue", "-h", "-j", job, "-o", "%L"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    left = seconds_of(answer.strip())
    return None if left is None else now + left


def seconds_of(text: str) -> float | None:
    """Slurm's way to write a time: `DAYS-HH:MM:SS`, `HH:MM:SS`, `MM:SS`; None for words (UNLIMITED, NOT_SET)."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or not 2 <= len(parts) <= 3:
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86400 + seconds
