"""Phases of a run: the time of each, the open ones, and a rank's own work in them without waiting for others.

Metrics, watchdog and profiler share one list of phases, `config.watchdog.PHASES`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from megarlhf.config.watchdog import PHASES

SUMS: dict[str, tuple[str, ...]] = {
    "seconds_rollout": ("rollout",),
    "seconds_experience": ("reward", "score", "advantages"),
    "seconds_train": ("train", "optimizer"),
    "seconds_reshard": ("reshard",),
    "seconds_certificate": ("certificate",),
    "seconds_offload": ("offload",),
}
"""Metrics of `rl` that are sums over phases of all roles."""
RATES: dict[str, str] = {
    "rollout_tokens_per_second": "seconds_rollout",
    "rollout_idle_fraction": "seconds_rollout",
    "tokens_per_second": "seconds_train",
}
"""Metrics that are an amount per second of such a sum. The amount is tokens, or seconds in which engines were idle."""


@dataclass(frozen=True)
class OpenPhase:
    """A phase that has been entered and not yet left."""

    name: str
    since: float
    """Time on the clock of `Phases`."""
    serial: int
    """Number that distinguishes two entries into the same phase."""


class Observer(Protocol):
    """Receives the begin and the end of each phase, in the main thread."""

    def entered(self, phase: OpenPhase) -> None: ...

    def left(self, phase: OpenPhase, failure: BaseException | None) -> None:
        """May raise in place of `failure`."""
        ...


class Preparation(Protocol):
    """Brings to the device what a phase needs."""

    @property
    def moves(self) -> bool:
        """Whether anything has to be loaded or offloaded."""
        ...

    def __call__(self) -> None: ...


class PhaseExchange(Protocol):
    """The exchange between all ranks at the end of a step."""

    def end_step(self, step: int, local_seconds: Mapping[str, float]) -> Exception | None:
        """Exchange; collective. Returns, on all ranks, the error with which the run ends after the step is saved."""
        ...


class Phases:
    """Measures phases, which may be nested.

        phases.begin_step(step)
        with phases("rollout"):
            rollouts = engine.generate(...)
            phases.count("rollout_tokens_per_second", tokens)
        metrics |= phases.rates() | seconds_of(phases.end_step(step))
        ...
        phases.raise_if_late()

    Seconds of an inner phase do not count for the outer one, so that the seconds of a step add up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: tuple[OpenPhase, ...] = ()
        """Open phases, outermost first. The tuple is replaced, because another thread may read it."""
        self.step: int | None = None
        """The current step, from 1; None before the first step and between two, for example while one is saved."""
        self.observer: Observer | None = None
        self.sharing: PhaseExchange | None = None
        self.before: dict[str, Preparation] = {}
        """Preparation of a phase, by its name. It runs in the phase `offload`, before the phase itself begins."""
        self._serials = itertools.count()
        self._inner: list[float] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._local: dict[str, float] = defaultdict(float)
        self._amounts: dict[str, float] = defaultdict(float)
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Scope of the phase `name`; a role's phase is written `score/actor`."""
        if (kind := name.partition("/")[0]) not in PHASES:
            raise ValueError(f"unknown phase {kind!r}; the known ones are {', '.join(PHASES)}")
        if (preparation := self.before.get(name)) is not None and preparation.moves:
            with self("offload"):
                preparation()
        phase = OpenPhase(name, self.clock(), next(self._serials))
        self.open = (*self.open, phase)
        self._inner.append(0.0)
        failure: BaseException | None = None
        try:
            if self.observer is not None:
                self.observer.entered(phase)
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self.open = self.open[:-1]
            seconds = self.clock() - phase.since
            self._seconds[name] += seconds - self._inner.pop()
            if self._inner:
                self._inner[-1] += seconds
            if self.observer is not None:
                self.observer.left(phase, failure)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Scope of work without waiting for other ranks. Its seconds are compared with the other ranks'."""
        began = self.clock()
        try:
            yield
        finally:
            self.add_local(self.clock() - began)

    def add_local(self, seconds: float) -> None:
        """Add seconds of such work that was timed elsewhere. They count for the innermost open phase."""
        if self.open:
            self._local[self.open[-1].name] += seconds

    def count(self, rate: str, amount: float) -> None:
        """Add an amount, over all ranks, to the metric `rate` (a key of `RATES`) of this step.

        NaN: the amount of this process, whose seconds are measured, is unknown. Then the step has no such metric.
        """
        assert rate in RATES, f"unknown rate {rate!r}; the known ones are {', '.join(RATES)}"
        self._amounts[rate] += amount

    def rates(self) -> dict[str, float]:
        """The metrics `RATES` since the last lap, without those whose phases took no time."""
        seconds = seconds_of(self._seconds)
        counted = {rate: amount for rate, amount in self._amounts.items() if amount > 0 and seconds.get(RATES[rate])}
        return {rate: amount / seconds[RATES[rate]] for rate, amount in counted.items()}

    def lap(self) -> dict[str, float]:
        """Seconds of each phase that has ended since the last lap, and begin a new one."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        self._local.clear()
        self._amounts.clear()
        return seconds

    def begin_step(self, step: int) -> None:
        """Begin a step. What was measured before it, such as building and saving, does not count for it."""
        self.lap()
        self.step = step

    def end_step(self, step: int) -> dict[str, float]:
        """End a step: exchange with the other ranks, then `lap`. Collective."""
        if self.sharing is not None:
            self._failure = self.sharing.end_step(step, dict(self._local))
        self.step = None
        return self.lap()

    def raise_if_late(self) -> None:
        """End the run after the step is saved, if a phase of any rank has passed its limit and ended by itself.

        Raises: WatchdogTimeout, on all ranks.
        """
        if self._failure is not None:
            raise self._failure


def seconds_of(lap: Mapping[str, float]) -> dict[str, float]:
    """The metrics `seconds_*` of `rl` from a step's seconds by phase. A sum without any of its phases is left out."""
    kinds: dict[str, float] = defaultdict(float)
    for name, seconds in lap.items():
        kinds[name.partition("/")[0]] += seconds
    return {
        metric: sum(kinds[kind] for kind in parts if kind in kinds)
        for metric, parts in SUMS.items()
        if any(kind in kinds for kind in parts)
    }
