"""Progress of a run: a live bar on a terminal, or else a plain line from time to time."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from megarlhf.observe.records.metrics import Metric

HEADLINES = (
    "reward_mean",
    "eval_accuracy",
    "kl",
    "rollout_logprob_gap_max",
    "response_length_mean",
    "entropy",
    "loss",
    "eval_perplexity",
    "pair_accuracy",
    "eval_pair_accuracy",
    "eval_loss",
    "grad_norm",
    "learning_rate",
)
"""Metrics in order of importance. The first few that a command logs are shown."""

SPEEDS = {
    "rollout_tokens_per_second": "tokens/s drawn",
    "tokens_per_second": "tokens/s trained",
    "peak_memory_gib": "GiB peak",
}
"""Metrics that are shown behind those, with their units."""
MAX_SHOWN = 6
NOISE = 1e-12
"""Magnitude below which a number is a rounding error of fp32 or fp64 sums."""
PLAIN_WIDTH = 140  # a log file has no width of its own; rich would fold at 80


def make_console() -> Console:
    """A console on stdout, as wide as the terminal, or `PLAIN_WIDTH` if stdout is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def table(title: str, rows: Sequence[Sequence[object]], columns: Sequence[str]) -> Table:
    """A table for `Progress.note` or a console. Columns of numbers are aligned to the right. It has no header where all
    columns are without a name.

    Floats are shortened by `format_number`; None is shown as a dash. Raises: ValueError for a row of the wrong length.
    """
    result = Table(title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: row {list(row)} has {len(row)} cells, expected {len(columns)}")
    for index, column in enumerate(columns):
        values = [row[index] for row in rows if row[index] is not None]
        right = bool(values) and all(_is_number(value) for value in values)
        result.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        result.add_row(*map(_cell, row))
    return result


def format_number(value: float | int | None, largest: float = 0.0) -> str:
    """Four significant digits; integers whole; a dash for None; `~0` for rounding noise.

    largest: the greatest magnitude among the values beside it, such as those of the same metric at other steps. What is
             below a millionth of it is noise; and so is whatever is below `NOISE`.
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if value != 0 and abs(value) < max(NOISE, 1e-6 * largest):
        return "~0"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_duration(seconds: float | None) -> str:
    """`h:mm:ss`, or `-:--:--` for None."""
    if seconds is None:
        return "-:--:--"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}"


class Progress:
    """Shows a run's step, elapsed and remaining time, and its most important metrics.

        with Progress("rl", total=200, enabled=rank == 0) as progress:
            progress.step(1, metrics)      # one step is done
            progress.note("saved checkpoints/step-1")

    title:    the command
    total:    steps of the whole run
    enabled:  False on ranks other than 0: nothing is printed
    start:    steps done before this process began (a resume); they do not count for the remaining time
    headline: metrics, the most important first; the first `MAX_SHOWN` that have been logged are shown, with their
              last value
    interval_seconds: without a terminal, the time between two lines; the first and last always come
    activity: what the run is doing now, in words; without a terminal it is told when a step takes longer than the
              interval
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        enabled: bool = True,
        start: int = 0,
        headline: Sequence[str] = HEADLINES,
        interval_seconds: float = 60.0,
        activity: Callable[[], str] = str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._start, self._done = title, total, start, start
        self._headline, self._interval_seconds, self._clock = headline, interval_seconds, clock
        self._console = (console or make_console()) if enabled else None
        self._latest: dict[str, Metric] = {}
        self._begin, self._last_line = clock(), -math.inf
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[times]}"),
            expand=True,
        )
        self._bar.add_task(title, total=total)
        self._activity = activity
        self._live: Live | None = None
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._console is None:
            return self
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._renderable)
            self._live.start()
        else:
            self._teller.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        elif self._console is not None:
            self._teller.join()

    def _tell(self) -> None:
        """Print what the run is doing, when nothing was printed for an interval."""
        while not self._ended.wait(min(1.0, self._interval_seconds / 4)):
            now = self._clock()
            if now - max(self._last_line, self._begin) >= self._interval_seconds and (text := self._activity()):
                self._last_line = now
                self._print(
                    f"{self._position()}  {self._times()}  {text}", markup=False, highlight=False, soft_wrap=True
                )

    def step(self, n: int, metrics: Mapping[str, Metric]) -> None:
        """Report that `n` of the total steps are done, and the metrics of the last one."""
        self._done = n
        self._latest.update(metrics)
        if self._console is None or self._live is not None:
            return  # silent, or drawn by the live display
        now = self._clock()
        if n >= self._total or now - self._last_line >= self._interval_seconds:
            self._last_line = now
            line = "  ".join([self._position(), self._times(), *self._shown()])
            self._print(line, markup=False, highlight=False, soft_wrap=True)

    def note(self, message: RenderableType) -> None:
        """Print a message or a `table` above the bar. Rich's markup in a message is not interpreted."""
        is_text = isinstance(message, str)
        if self._console is not None:
            self._print(Text(str(message)) if is_text else message, soft_wrap=is_text)

    def _print(self, message: RenderableType, **options: Any) -> None:
        """Print, or lose the line: if stdout is a file, a full disk must not end the run."""
        assert self._console is not None
        with contextlib.suppress(OSError):
            self._console.print(message, **options)

    def _position(self) -> str:
        percent = 100 * self._done // self._total if self._total else 100
        return f"{self._title} {self._done}/{self._total} {percent}%"

    def _times(self) -> str:
        """Elapsed time of this process, and the remaining time at its pace (unknown before its first step)."""
        elapsed, done_here = self._clock() - self._begin, self._done - self._start
        if done_here <= 0:
            return f"elapsed {format_duration(elapsed)}  left {format_duration(None)}"
        pace = elapsed / done_here
        left = format_duration(pace * max(self._total - self._done, 0))
        return f"elapsed {format_duration(elapsed)}  left {left}  {format_number(pace)} s/step"

    def _shown(self) -> list[str]:
        names = [name for name in self._headline if name in self._latest][:MAX_SHOWN]
        return [f"{name} {format_number(self._latest[name])}" for name in names] + [
            f"{format_number(self._latest[name])} {unit}" for name, unit in SPEEDS.items() if name in self._latest
        ]

    def _renderable(self) -> RenderableType:
        self._bar.update(self._bar.task_ids[0], completed=self._done, times=self._times())
        lines = [Text("   ".join(self._shown()), style="cyan")]
        if text := self._activity():
            lines.append(Text(text, style="dim", overflow="ellipsis", no_wrap=True))
        return Group(self._bar.get_renderable(), *lines)


def _is_number(value: object) -> TypeGuard[float | int]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text(format_number(value) if value is None or _is_number(value) else str(value))
