"""The watchdog: a thread on every rank that ends phases which have passed their limit, and reports what ranks do.

When a limit is passed:

1. Each rank writes its stacks to `run.dir/failures/watchdog/START/rank_RRRRR.json`. Ranks that are not late see the
   folder and write too. START is the time at which the run was started.
2. One rank prints a report of them, beginning with ranks that do not wait in a collective.
3. A rank that does not wait is interrupted: SIGUSR2 raises `WatchdogInterrupt` in its main thread, at the next
   Python instruction. Inside `raise_on_all_ranks` (rule rewards) that becomes an error of all ranks together, and the
   run can save. A rank that waits in a collective is not interrupted, because the others would then wait for it.
4. A late rank that is still in the phase after `watchdog.grace` seconds ends with status 3, and its launcher ends the
   others.

A phase that passes its limit and then ends by itself ends the run on all ranks, after the step is saved.

Python's lock: the thread cannot run while the main thread is in C code that keeps the lock, such as a regular
expression that backtracks without end. Then a timer of processor time calls the same signal handler, which Python's
`re` lets run. For code that does not even do that, faulthandler prints the stack and ends the process (with status 1)
a minute later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megarlhf.config.watchdog import WatchdogConfig
from megarlhf.errors import WatchdogInterrupt, WatchdogTimeout
from megarlhf.observe.watch.phases import OpenPhase, Phases
from megarlhf.observe.watch.stacks import (
    describe_states,
    innermost_line,
    read_states,
    stacks_of_threads,
    state_from,
    waits_for_others,
    write_state,
)
from megarlhf.observe.watch.stragglers import StepExchange, Stragglers
from megarlhf.runtime import Runtime

EXIT_STATUS = 3
POLL_SECONDS = 1.0
FOLDER_SECONDS = 5.0
"""Between two looks for files of another rank's watchdog."""
GATHER_SECONDS = 10.0
"""Time that the report waits for all ranks. After twice as long another rank than the first prints it."""
INTERRUPT_SECONDS = 5.0
"""Between two interrupts of a rank that does not leave the phase."""
LAST_RESORT_SECONDS = 60.0
"""Time from the end of the grace until faulthandler ends the process."""


class Watchdog:
    """Watches the phases of one rank.

    folder:  folder to which all ranks of this start write their states
    hosts:   host of every rank
    end:     ends this process at once with a status
    """

    def __init__(
        self,
        cfg: WatchdogConfig,
        phases: Phases,
        folder: Path,
        rank: int,
        hosts: Sequence[str],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._cfg, self._phases, self._folder = cfg, phases, folder
        self._rank, self._hosts, self._end = rank, hosts, end
        self.late = False
        """Whether a phase of this rank has passed its limit."""
        self._interrupted: int | None = None
        """Serial of the phase that was interrupted last."""
        self._handled: set[int] = set()
        """Serials of phases for which the thread has done its work."""
        self._written: set[int] = set()
        """Serials of phases whose state is written. After an interrupt the state would be another one."""
        self._reported = False
        self._looked = phases.clock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    # --- in the main thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Start watching. Called in the main thread, which alone gets signals."""
        self._handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGUSR2, signal.SIGVTALRM)}
        signal.siginterrupt(signal.SIGVTALRM, False)  # system calls in C go on
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._arm(())
        self._thread.join(timeout=2 * GATHER_SECONDS + POLL_SECONDS)  # it may be about to print
        for signum, handler in self._handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def entered(self, phase: OpenPhase) -> None:
        self._arm(self._phases.open)

    def left(self, phase: OpenPhase, failure: BaseException | None) -> None:
        """Raises: WatchdogTimeout in place of the interrupt, also if the phase has swallowed it."""
        self._arm(self._phases.open)
        if isinstance(failure, WatchdogInterrupt):
            raise WatchdogTimeout(str(failure), agreed=False) from failure
        if failure is None and self._interrupted == phase.serial:
            message = f"phase {phase.name!r} was interrupted by the watchdog, and its code ignored the interrupt"
            raise WatchdogTimeout(message, agreed=False)

    def _seconds_left(self, phase: OpenPhase) -> float:
        """Seconds until the limit of an open phase."""
        limit = self._cfg.limit(phase.name)
        return limit - (self._phases.clock() - phase.since) if limit else float("inf")

    def _arm(self, phases: Sequence[OpenPhase]) -> None:
        """Set the two timers that need no thread of ours."""
        left = min(map(self._seconds_left, phases), default=float("inf"))
        finite = left != float("inf")
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left + POLL_SECONDS, 0.1) if finite else 0.0)
        if finite:
            grace = self._cfg.grace + 2 * GATHER_SECONDS + LAST_RESORT_SECONDS
            faulthandler.dump_traceback_later(max(left, 0.0) + grace, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """End a late phase that does not wait for other ranks. Runs between two Python instructions."""
        late = self._first_late()
        if late is None:
            if signum == signal.SIGVTALRM:  # several threads have used more processor time than time has passed
                self._arm(self._phases.open)
            return
        if signum == signal.SIGVTALRM:
            if late.serial not in self._written:  # the thread did not get to it
                self._write(late, frame, {})
            signal.setitimer(signal.ITIMER_VIRTUAL, INTERRUPT_SECONDS)
        if not waits_for_others(frame):
            self._interrupted = self._phases.open[-1].serial
            raise WatchdogInterrupt(
                f"phase {late.name!r} has passed its limit of {self._cfg.limit(late.name):g} s "
                f"(watchdog.{late.name.partition('/')[0]}) in {innermost_line(frame)}"
            )

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self._check()
        self._report_what_the_handler_wrote()

    def _report_what_the_handler_wrote(self) -> None:
        if self.late and not self._reported:
            self._report()

    def _first_late(self) -> OpenPhase | None:
        return next((phase for phase in self._phases.open if self._seconds_left(phase) < 0), None)

    def _check(self) -> None:
        """Look for a late phase of this rank, or of another one."""
        open_phases = self._phases.open
        late = self._first_late()
        if late is not None and late.serial not in self._handled:
            self._handle(late)
        elif self.late:
            self._report_what_the_handler_wrote()
        elif not self._handled and self._phases.clock() - self._looked > FOLDER_SECONDS:
            self._looked = self._phases.clock()
            if self._folder.is_dir():
                self._handle(open_phases[-1] if open_phases else None)

    def _handle(self, phase: OpenPhase | None) -> None:
        """Write, report, interrupt, and end the process unless it leaves the phase."""
        self._handled.add(-1 if phase is None else phase.serial)
        late = phase is not None and self._seconds_left(phase) < 0
        frame, threads = stacks_of_threads()
        # Checked after reading the stacks: the handler may have run in between.
        if phase is None or phase.serial not in self._written:
            self._write(phase, frame, threads)
        self._report()
        deadline = self._phases.clock() + self._cfg.grace
        while late and phase in self._phases.open and not self._closed.is_set():
            if self._phases.clock() > deadline:
                _print(
                    f"watchdog: rank {self._rank} on {self._hosts[self._rank]} is still in the phase "
                    f"{self._cfg.grace:g} s (watchdog.grace) later; it ends itself with status {EXIT_STATUS}"
                )
                self._end(EXIT_STATUS)
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            self._closed.wait(min(INTERRUPT_SECONDS, self._cfg.grace))

    def _write(self, phase: OpenPhase | None, frame: FrameType | None, threads: dict[str, list[str]]) -> None:
        """Write this rank's state, from the thread or, if that cannot run, from the signal handler."""
        late = phase is not None and self._seconds_left(phase) < 0
        self.late = self.late or late
        state = state_from(
            frame,
            threads,
            rank=self._rank,
            host=self._hosts[self._rank],
            pid=os.getpid(),
            phase="" if phase is None else phase.name,
            seconds=0.0 if phase is None else self._phases.clock() - phase.since,
            limit=0.0 if phase is None else self._cfg.limit(phase.name),
            late=late,
        )
        try:
            write_state(state, self._folder)
        except OSError as error:  # a full disk: each rank prints its own
            _print(f"{describe_states([state], [], self._folder)}\n  (which cannot be written: {error})")
        if phase is not None:  # last, because another signal may have interrupted the handler
            self._written.add(phase.serial)

    def _report(self) -> None:
        """Print the states of all ranks, from the first rank that can."""
        if self._reported:
            return
        self._reported = True
        began, report = time.monotonic(), self._folder / "report.txt"
        while not report.exists() and (waited := time.monotonic() - began) < 3 * GATHER_SECONDS:
            try:
                states = read_states(self._folder)
            except OSError:
                return
            ranks = [state.rank for state in states]
            complete = len(ranks) == len(self._hosts)
            mine = ranks[:1] == [self._rank] and (self._rank == 0 or complete or waited > 2 * GATHER_SECONDS)
            if mine and (complete or waited > GATHER_SECONDS):
                with contextlib.suppress(OSError), report.open("x", encoding="utf-8") as file:
                    text = describe_states(states, self._hosts, self._folder)
                    file.write(text + "\n")
                    _print(text)
                return
            time.sleep(0.1)


def _print(text: str) -> None:
    """Print without Python's buffers, whose locks the main thread may hold."""
    os.write(2, (text + "\n").encode())


@contextlib.contextmanager
def watched_phases(cfg: WatchdogConfig, run_dir: Path, runtime: Runtime) -> Iterator[Phases]:
    """The phases of a run, with watchdog and stragglers. Collective."""
    start = datetime.now().strftime("%Y%m%dT%H%M%S")
    hosts_and_starts = [(socket.gethostname(), start)] * runtime.world_size
    if runtime.world_size > 1:
        dist.all_gather_object(hosts_and_starts, hosts_and_starts[0])
    hosts, start = [host for host, _ in hosts_and_starts], hosts_and_starts[0][1]
    phases = Phases()
    watchdog = Watchdog(cfg, phases, run_dir / "failures" / "watchdog" / start, runtime.rank, hosts)
    phases.sharing = StepExchange(Stragglers(cfg.stragglers, hosts), runtime, watchdog)
    if not cfg.enabled:
        yield phases
        return
    phases.observer = watchdog
    watchdog.start()
    try:
        yield phases
    finally:
        watchdog.close()
