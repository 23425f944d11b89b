"""Progress of reading and writing checkpoints, on stderr: a bar, or plain lines if stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_bar(title: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show bytes, speed and time left. Yields two functions: one takes the total, one the bytes of each advance."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    if not sys.stderr.isatty():
        lines = _PlainLines(title)
        yield lines.start, lines.advance
        return
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("planning", total=None)
        yield (
            lambda total: bar.update(task, total=total, description=title),
            lambda count: bar.advance(task, count),
        )


@contextmanager
def count_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show how many of `total` items are done. Yields a function to call with each item's name."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda name: bar.advance(task)


class _PlainLines:
    """Prints a line when the plan is made, and one for every tenth of the bytes."""

    def __init__(self, title: str) -> None:
        self._title, self._total, self._done, self._tenths = title, 0, 0, 0
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def start(self, total: int) -> None:
        self._total = total
        seconds = time.monotonic() - self._start
        print(f"{self._title}: {total / 1e9:.3f} GB, planned in {seconds:.1f} s", file=sys.stderr)
        self._start = time.monotonic()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            tenths = 10 * self._done // self._total if self._total else 0
            if tenths <= self._tenths:
                return
            self._tenths = tenths
            left = (time.monotonic() - self._start) * (self._total - self._done) / self._done
            done = f"{self._done / 1e9:.3f} of {self._total / 1e9:.3f} GB"
            print(f"{self._title}: {done}, {left:.0f} s left", file=sys.stderr)
