"""Progress of a rehearsal on the terminal: the phase of each rank, and the time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console

from megarlhf.observe.terminal.progress import format_duration
from megarlhf.rehearsal.processes import DONE, At, Told
from megarlhf.rehearsal.request import Request

PLAIN_SECONDS = 20.0
"""Time between two lines where there is no terminal."""


@contextlib.contextmanager
def shown(request: Request) -> Iterator[Told]:
    """Scope in which the progress of ranks is shown on stderr."""
    console = Console(stderr=True)
    view = _View(request)
    if not console.is_terminal:
        yield view.plain(console)
        return
    with console.status("starting") as status:

        def told(at: At) -> None:
            view.note(at)
            status.update(view.line())

        yield told


class _View:
    """Progress of all ranks."""

    def __init__(self, request: Request) -> None:
        self._request, self._began = request, time.monotonic()
        self._at: dict[int, At] = {}
        self._finished: dict[int, int] = {}
        """Operations of each rank that has finished."""
        self._expected = 0
        self._said = time.monotonic()

    def note(self, at: At) -> None:
        if at.phase == DONE:
            self._at.pop(at.rank, None)
            self._finished[at.rank] = at.operations
        else:
            self._at[at.rank] = at
            self._expected = max(self._expected, at.ranks)

    def line(self) -> str:
        """Progress as one line."""
        ranks = "; ".join(f"rank {at.rank}: step {at.step}, {at.phase}" for at in self._at.values())
        done = len(self._finished)
        return f"{done} of {self._expected or '?'} ranks done; {ranks}; {self._left()}"

    def _left(self) -> str:
        """Elapsed time, and the time left. Ranks are taken to be as long as the mean of those that have finished."""
        elapsed = time.monotonic() - self._began
        if not self._finished:
            return f"{format_duration(elapsed)} so far"
        each = sum(self._finished.values()) / len(self._finished)
        made = sum(self._finished.values()) + sum(min(at.operations, each) for at in self._at.values())
        whole = each * max(self._expected, len(self._finished) + len(self._at))
        left = elapsed * max(0.0, whole - made) / made if made else 0.0
        return f"{format_duration(elapsed)} so far, about {format_duration(left)} left"

    def plain(self, console: Console) -> Told:
        """Print a line every `PLAIN_SECONDS`."""

        def told(at: At) -> None:
            self.note(at)
            if time.monotonic() - self._said > PLAIN_SECONDS:
                self._said = time.monotonic()
                console.print(self.line(), highlight=False, soft_wrap=True)

        return told
