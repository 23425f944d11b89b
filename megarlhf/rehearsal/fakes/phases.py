"""Phases of a rehearsed run: they pass step and phase to ledger, wire and meter, and end the run after some steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megarlhf.config import ProfileConfig
from megarlhf.config.watchdog import WatchdogConfig
from megarlhf.observe.watch.phases import OpenPhase, Phases
from megarlhf.runtime import Runtime


class StopRehearsal(Exception):
    """All requested steps are done."""


BETWEEN = "between phases"


class Steps:
    """Observer of the phases of one rank.

    moved: called with (step, phase) whenever either changes. Step 1 is the first, 0 is before it.
    ended: called with the number of a finished step, 0 before the first.
    """

    def __init__(self, num_steps: int, moved: Callable[[int, str], None], ended: Callable[[int], None]) -> None:
        self._num_steps, self._moved, self._ended = num_steps, moved, ended
        self._step = 0
        self._phases = Phases()
        self._open: list[str] = []
        self._over = False
        """Whether the run is on its way out, which is not rehearsed."""

    def entered(self, phase: OpenPhase) -> None:
        if self._phases.step is not None and not self._step:
            self._ended(0)
            self._step = self._phases.step
        self._open.append(phase.name)
        self._moved(self._step, phase.name)

    def left(self, phase: OpenPhase, failure: BaseException | None) -> None:
        self._open.pop()
        if not self._over:
            self._moved(self._step, self._open[-1] if self._open else BETWEEN)

    def end_step(self, step: int, local_seconds: Mapping[str, float]) -> Exception | None:
        """Method of `observe.watch.phases.Sharing`."""
        self._ended(step)
        if step >= self._num_steps:
            self._over = True
            raise StopRehearsal
        self._step = step + 1
        self._moved(self._step, self._open[-1] if self._open else BETWEEN)
        return None

    @contextlib.contextmanager
    def phases(
        self, watchdog: WatchdogConfig, profile: ProfileConfig, run_dir: Path, runtime: Runtime
    ) -> Iterator[Phases]:
        """Replacement of `observe.profile.recorded_phases`."""
        self._phases.observer, self._phases.sharing = self, self
        yield self._phases
