"""A run's metrics: `metrics.jsonl` (one JSON object a step), TensorBoard, and any other tracker."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from megarlhf.observe.samples import Row, as_markdown

METRICS_FILE = "metrics.jsonl"

Metric = float | int | None
"""What a step may log under a name; None (like NaN and infinities) is written as null."""

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go besides: `wandb_run.WandbRun`. It raises nothing."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None: ...

    def log_samples(self, name: str, step: int, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes each step to `run_dir/metrics.jsonl`, flushed, and to the trackers that were asked for.

    run_dir:     the run directory; made if missing
    tensorboard: also write scalars and tables of samples under `run_dir/tensorboard`
    tracker:     gets the same; closed with the writer
    resume_step: the last step that the resumed checkpoint contains. Lines of later steps are cut, and so is
                 a last line torn by a crash. None starts a new record, where there is none yet.

    Raises: ValueError when metrics.jsonl is damaged before its last line, or a new record is asked for where one is.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        tensorboard: bool = True,
        tracker: Tracker | None = None,
        resume_step: int | None = None,
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        if resume_step is None and path.exists():
            raise ValueError(f"{path} is the record of an earlier run; give a new run another directory")
        if resume_step is not None:
            _cut_back(path, resume_step)
        self._last_step = resume_step
        self._file = path.open("ab")
        self._pending = bytearray()
        self._run_dir = run_dir
        self._tensorboard = _open_tensorboard(run_dir, resume_step) if tensorboard else None
        self._for_tensorboard: list[tuple[int, dict[str, float | int | str]]] | None = [] if tensorboard else None
        """What it has not taken yet: of one step, or of more after a full disk."""
        self._tracker = tracker

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append one line: `step` first, then the metrics sorted by name.

        Raises: ValueError for a step that does not rise, a metric called `step` or a value that is no number.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} after those of step {self._last_step}; steps must rise: log "
                "one mapping a step, and after a resume continue with the step that follows resume_step"
            )
        row = {name: _plain_number(name, metrics[name]) for name in sorted(metrics)}
        self._pending += (json.dumps({"step": int(step), **row}, allow_nan=False) + "\n").encode()
        self._write_pending()
        self._last_step = step
        finite = {name: value for name, value in row.items() if value is not None}
        if self._for_tensorboard is not None:
            # Its scalars have 32 bits, in which a time since 1970 is off by minutes; it notes the time by itself.
            self._for_tensorboard.append((step, {k: v for k, v in finite.items() if k != "wall_clock"}))
            self._write_events(self._for_tensorboard)
        if self._tracker is not None:
            self._tracker.log(step, finite)

    def log_samples(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """A table of samples, for the trackers."""
        if self._for_tensorboard is not None:
            self._for_tensorboard.append((step, {name: as_markdown(rows)}))
            self._write_events(self._for_tensorboard)
        if self._tracker is not None:
            self._tracker.log_samples(name, step, rows)

    def flush(self) -> None:
        """Write what could not be written yet: to be called before a resume point is, which must not outlive the lines
        of its steps."""
        if self._pending:
            self._write_pending()
        if self._for_tensorboard:
            self._write_events(self._for_tensorboard)

    def _write_pending(self) -> None:
        """Lines that a full disk did not take are kept, and written as soon as there is room."""
        try:
            while self._pending:
                del self._pending[: os.write(self._file.fileno(), self._pending)]
            os.fsync(self._file.fileno())
        except OSError as error:
            log.warning("%s: %d bytes could not be written yet: %s", self._file.name, len(self._pending), error)

    def _write_events(self, rows: list[tuple[int, dict[str, float | int | str]]]) -> None:
        """The same of TensorBoard's events. A file of events that has failed once takes no more: a new one is begun."""
        try:
            if self._tensorboard is None:
                self._tensorboard = _open_tensorboard(self._run_dir, rows[0][0] - 1)
            for step, row in rows:
                for name, value in row.items():
                    add = self._tensorboard.add_text if isinstance(value, str) else self._tensorboard.add_scalar
                    add(name, value, step)
            self._tensorboard.flush()
            rows.clear()
        except OSError as error:
            log.warning("TensorBoard's events of step %d could not be written yet: %s", rows[-1][0], error)
            self._tensorboard = None

    def close(self) -> None:
        self._write_pending()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._tracker is not None:
            self._tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The lines of `run_dir/metrics.jsonl`, oldest first; a torn last line (a run being written) is left out.

    Raises: ValueError without the file, or if a line before the last is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"no {METRICS_FILE} in {run_dir}; expected the run.dir of a run that has logged a step")
    return _read_rows(path)


def require_readable(run_dir: Path) -> None:
    """Raises: ValueError where an earlier run's metrics are damaged before the last line."""
    if (path := run_dir / METRICS_FILE).exists():
        _read_rows(path)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    lines.pop()  # what follows the last newline: nothing, or the torn line
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _damaged(path, number, line) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise _damaged(path, number, line)
        rows.append(row)
    return rows


def _damaged(path: Path, number: int, line: bytes) -> ValueError:
    return ValueError(
        f"{path}, line {number}: got {line[:80]!r}, expected a JSON object with an integer `step`; only the "
        "last line can be torn by a crash, so something else wrote here: repair or remove the line"
    )


def _plain_number(name: str, value: Any) -> float | int | None:
    if name == "step":
        raise ValueError("got a metric called `step`, which is the argument of that name: leave it out of metrics")
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    raise ValueError(
        f"metric {name} is a {type(value).__name__}, expected float, int or None; give a tensor's `.item()`"
    )


def _cut_back(path: Path, resume_step: int) -> None:
    """Keep the lines with step <= resume_step, atomically."""
    if not path.exists():
        log.warning("resuming after step %d, but there is no %s: the record starts here", resume_step, path)
        return
    rows = [row for row in _read_rows(path) if row["step"] <= resume_step]
    newest = rows[-1]["step"] if rows else -1
    if newest < resume_step:
        log.warning("%s ends at step %d, and the run goes on after step %d: lines are lost", path, newest, resume_step)
    kept = [json.dumps(row) + "\n" for row in rows]
    scratch = path.with_name(path.name + ".cut")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _open_tensorboard(run_dir: Path, resume_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    purge_step = 0 if resume_step is None else resume_step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)
