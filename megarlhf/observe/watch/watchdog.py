"""The watchdog: a thread on every rank that ends a phase which has passed its limit, and says what it was doing.

What happens when a limit is passed:

1. Each rank writes its stacks to `run.dir/failures/watchdog/START/rank_RRRRR.json`; ranks that are not late see the
   folder and write too. START is when the run was started.
2. One rank prints a report made of them, those first that do something else than wait in a collective.
3. A rank that does something else is interrupted: SIGUSR2 raises `WatchdogInterrupt` in its main thread, at the next
   Python instruction. Inside `raise_on_all_ranks` (rule rewards) that is an error of all ranks together, and the run
   can save. A rank that waits in a collective is left alone: if it were taken out, the others would wait for it.
4. A late rank that is still in the phase after `watchdog.grace` seconds ends with status 3, and its launcher the
   others.

A phase that passes its limit and comes to its end by itself ends the run when the step is saved, on all ranks.

Python's lock: a thread cannot look while the main thread is in C code that keeps the lock, such as a regular expression
that backtracks without end. A timer of processor time then brings the same signal handler, which Python's `re` calls.
For code that does not even do that, faulthandler prints the stack and ends the process (with status 1) a minute later.
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
    describe,
    place_of,
    read_states,
    stacks_of_threads,
    state_from,
    waits_for_others,
    write_state,
)
from megarlhf.observe.watch.stragglers import Border, Stragglers
from megarlhf.runtime import Runtime

EXIT_STATUS = 3
POLL_SECONDS = 1.0
FOLDER_SECONDS = 5.0
"""Between two looks for what another rank's watchdog has written."""
GATHER_SECONDS = 10.0
"""How long the report waits for the ranks; the same again until another rank than the first prints it."""
INTERRUPT_SECONDS = 5.0
"""Between two interrupts of a rank that does not leave the phase."""
LAST_RESORT_SECONDS = 60.0
"""From the end of the grace until faulthandler ends the process."""


class Watchdog:
    """Watches the phases of one rank.

    folder:  where all ranks of this start write what they were doing
    hosts:   of every rank
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
        """Serial of the phase in which the interrupt was raised last."""
        self._handled: set[int] = set()
        """Serials of phases for which the thread has done its work."""
        self._written: set[int] = set()
        """Serials of phases whose state is written: once interrupted, the rank stands somewhere else."""
        self._reported = False
        self._looked = phases.clock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    # --- in the main thread -------------------------------------------------------------------------

    def start(self) -> None:
        """From the main thread, which alone gets signals."""
        self._handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGUSR2, signal.SIGVTALRM)}
        signal.siginterrupt(signal.SIGVTALRM, False)  # system calls in C go on
        self._thread.start()

    def close(self) -> None:
        """No phase is watched any more."""
        self._closed.set()
        self._arm(())
        self._thread.join(timeout=2 * GATHER_SECONDS + POLL_SECONDS)  # it may be about to print
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def entered(self, phase: OpenPhase) -> None:
        self._arm(self._phases.open)

    def left(self, phase: OpenPhase, failure: BaseException | None) -> None:
        """Raises: WatchdogTimeout in place of the interrupt, also where the phase has swallowed it."""
        self._arm(self._phases.open)
        if isinstance(failure, WatchdogInterrupt):
            raise WatchdogTimeout(str(failure), agreed=False) from failure
        if failure is None and self._interrupted == phase.serial:
            message = f"phase {phase.name!r} was interrupted by the watchdog, and what it ran took no notice"
            raise WatchdogTimeout(message, agreed=False)

    def _left_of(self, phase: OpenPhase) -> float:
        """Seconds until the limit of an open phase."""
        limit = self._cfg.limit(phase.name)
        return limit - (self._phases.clock() - phase.since) if limit else float("inf")

    def _arm(self, phases: Sequence[OpenPhase]) -> None:
        """The two timers that need no thread of ours."""
        left = min(map(self._left_of, phases), default=float("inf"))
        finite = left != float("inf")
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left + POLL_SECONDS, 0.1) if finite else 0.0)
        if finite:
            grace = self._cfg.grace + 2 * GATHER_SECONDS + LAST_RESORT_SECONDS
            faulthandler.dump_traceback_later(max(left, 0.0) + grace, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two Python instructions: end the phase that is late, unless others are waited
        for."""
        late = self._first_late()
        if late is None:
            if number == signal.SIGVTALRM:  # more processor time than time has passed: several threads
                self._arm(self._phases.open)
            return
        if number == signal.SIGVTALRM:
            if late.serial not in self._written:  # the thread did not get to it
                self._write(late, frame, {})
            signal.setitimer(signal.ITIMER_VIRTUAL, INTERRUPT_SECONDS)
        if not waits_for_others(frame):
            self._interrupted = self._phases.open[-1].serial
            raise WatchdogInterrupt(
                f"phase {late.name!r} has passed its limit of {self._cfg.limit(late.name):g} s "
                f"(watchdog.{late.name.partition('/')[0]}) in {place_of(frame)}"
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
        return next((phase for phase in self._phases.open if self._left_of(phase) < 0), None)

    def _check(self) -> None:
        """Whether a phase of this rank is late, or another rank's."""
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
        late = phase is not None and self._left_of(phase) < 0
        frame, threads = stacks_of_threads()
        # Asked after the look: the handler may have come between.
        if phase is None or phase.serial not in self._written:
            self._write(phase, frame, threads)
        self._report()
        deadline = self._phases.clock() + self._cfg.grace
        while late and phase in self._phases.open and not self._closed.is_set():
            if self._phases.clock() > deadline:
                _say(
                    f"watchdog: rank {self._rank} on {self._hosts[self._rank]} is still in the phase "
                    f"{self._cfg.grace:g} s (watchdog.grace) later; it ends itself with status {EXIT_STATUS}"
                )
                self._end(EXIT_STATUS)
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            self._closed.wait(min(INTERRUPT_SECONDS, self._cfg.grace))

    def _write(self, phase: OpenPhase | None, frame: FrameType | None, threads: dict[str, list[str]]) -> None:
        """This rank's state, from the thread or, where that cannot run, from the signal handler."""
        late = phase is not None and self._left_of(phase) < 0
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
        except OSError as error:  # a full disk: said by each rank for itself
            _say(f"{describe([state], [], self._folder)}\n  (which cannot be written: {error})")
        if phase is not None:  # only now: another signal may have interrupted the handler
            self._written.add(phase.serial)

    def _report(self) -> None:
        """Print what all ranks have written, from one of them: the first that can."""
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
                    text = describe(states, self._hosts, self._folder)
                    file.write(text + "\n")
                    _say(text)
                return
            time.sleep(0.1)


def _say(text: str) -> None:
    """Past Python's buffers and their locks, which the main thread may hold."""
    os.write(2, (text + "\n").encode())


@contextlib.contextmanager
def watched_phases(cfg: WatchdogConfig, run_dir: Path, runtime: Runtime) -> Iterator[Phases]:
    """The phases of a run, with watchdog and stragglers. Collective."""
    start = datetime.now().strftime("%Y%m%dT%H%M%S")
    told = [(socket.gethostname(), start)] * runtime.world_size
    if runtime.world_size > 1:
        dist.all_gather_object(told, told[0])
    hosts, start = [host for host, _ in told], told[0][1]
    phases = Phases()
    watchdog = Watchdog(cfg, phases, run_dir / "failures" / "watchdog" / start, runtime.rank, hosts)
    phases.sharing = Border(Stragglers(cfg.stragglers, hosts), runtime, watchdog)
    if not cfg.enabled:
        yield phases
        return
    phases.observer = watchdog
    watchdog.start()
    try:
        yield phases
    finally:
        watchdog.close()
