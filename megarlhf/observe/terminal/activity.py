"""Words about what a run is doing now: the phase of its step, how long that has taken, how much of it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarlhf.observe.terminal.progress import format_duration
from megarlhf.observe.watch.phases import Phases


@dataclass(frozen=True)
class Part:
    """Part of a phase's work that is done."""

    done: int
    tokens: int = 0
    """Tokens so far."""


@dataclass(frozen=True)
class _Count:
    """Work of a phase that is counted."""

    total: int
    unit: str
    part: Callable[[], Part]
    share: float
    """Share of the whole that this rank counts; the others are taken to be as far."""
    first: Part
    since: float


class Activity:
    """The present work of a run. Another thread may read the text."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._count: _Count | None = None

    @contextlib.contextmanager
    def counting(self, total: int, unit: str, part: Callable[[], Part], *, share: float = 1.0) -> Iterator[None]:
        """Scope of work of which `part` tells how much is done.

        total: amount of the whole work. share: share of it that `part` counts
        """
        self._count = _Count(total, unit, part, share, part(), self._phases.clock())
        try:
            yield
        finally:
            self._count = None

    def text(self) -> str:
        """Words such as `step 3: rollout 0:01:20, 380 of 512 responses, 2,345 tokens/s, 0:00:28 left`; none between
        phases.
        Amounts that other ranks are taken to have done, too, begin with `about`."""
        phases, step, count = self._phases.open, self._phases.step, self._count
        if not phases:
            return ""
        now = self._phases.clock()
        words = [f"{phases[-1].name} {format_duration(now - phases[-1].since)}"]
        if count is not None:
            words += self._progress(count, now)
        return ("" if step is None else f"step {step}: ") + ", ".join(words)

    def _progress(self, count: _Count, now: float) -> list[str]:
        part, seconds = count.part(), now - count.since
        done = min(count.total, round(part.done / count.share))
        words = [f"{'about ' if count.share < 1 else ''}{done:,} of {count.total:,} {count.unit}"]
        if (tokens := part.tokens - count.first.tokens) and seconds > 0:
            words.append(f"{tokens / count.share / seconds:,.0f} tokens/s")
        if (new := done - round(count.first.done / count.share)) > 0:
            words.append(f"{format_duration(seconds / new * (count.total - done))} left")
        return words
