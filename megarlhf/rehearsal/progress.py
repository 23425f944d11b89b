"""Progress of a rehearsal on the terminal: the phase of each rank, and the time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console

from megarlhf.observe.terminal.progress import format_duration
from megarlhf.rehearsal.processes import DONE, OnProgress, RankProgress

PLAIN_SECONDS = 20.0
"""Time between two lines where there is no terminal."""


@contextlib.contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Scope in which the progress of ranks is shown on stderr."""
    console = Console(stderr=True)
    view = _View()
    if not console.is_terminal:
        yield view.plain(console)
        return
    with console.status("starting") as status:

        def on_progress(progress: RankProgress) -> None:
            view.note(progress)
            status.update(view.line())

        yield on_progress


class _View:
    """Progress of all ranks."""

    def __init__(self) -> None:
        self._began = self._last_line = time.monotonic()
        self._running: dict[int, RankProgress] = {}
        self._finished: dict[int, int] = {}
        """Operations of each rank that has finished."""
        self._expected = 0

    def note(self, progress: RankProgress) -> None:
        if progress.phase == DONE:
            self._running.pop(progress.rank, None)
            self._finished[progress.rank] = progress.operations
        else:
            self._running[progress.rank] = progress
            self._expected = max(self._expected, progress.ranks)

    def line(self) -> str:
        """Progress as one line."""
        ranks = "; ".join(f"rank {rank.rank}: step {rank.step}, {rank.phase}" for rank in self._running.values())
        return f"{len(self._finished)} of {self._expected or '?'} ranks done; {ranks}; {self._time()}"

    def _time(self) -> str:
        """Elapsed time, and the time left. Ranks are taken to be as long as the mean of those that have finished."""
        elapsed = time.monotonic() - self._began
        if not self._finished:
            return f"{format_duration(elapsed)} so far"
        mean = sum(self._finished.values()) / len(self._finished)
        done = sum(self._finished.values()) + sum(min(rank.operations, mean) for rank in self._running.values())
        total = mean * max(self._expected, len(self._finished) + len(self._running))
        left = elapsed * max(0.0, total - done) / done if done else 0.0
        return f"{format_duration(elapsed)} so far, about {format_duration(left)} left"

    def plain(self, console: Console) -> OnProgress:
        """Print a line every `PLAIN_SECONDS`."""

        def on_progress(progress: RankProgress) -> None:
            self.note(progress)
            if time.monotonic() - self._last_line > PLAIN_SECONDS:
                self._last_line = time.monotonic()
                console.print(self.line(), highlight=False, soft_wrap=True)

        return on_progress
