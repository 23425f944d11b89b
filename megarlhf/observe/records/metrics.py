"""A run's metrics: `metrics.jsonl` (one JSON object a step), TensorBoard, and any other tracker."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from megarlhf.observe.records.jsonl import StepLines, read_lines
from megarlhf.observe.records.sample_tables import Row, as_markdown

METRICS_FILE = "metrics.jsonl"

Metric = float | int | None
"""A value that a step logs under a name. None is written as null, and so are NaN and infinities."""

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A further destination of metrics, such as `wandb_run.WandbRun`. It raises nothing."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None: ...

    def log_samples(self, name: str, step: int, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes each step to `run_dir/metrics.jsonl`, to TensorBoard and to another tracker.

    run_dir:     the run directory; made if missing
    tensorboard: also write scalars and tables of samples under `run_dir/tensorboard`
    tracker:     gets the same; closed with the writer
    resume_step: see `StepLines`, also for what is raised
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
        self._lines = StepLines(run_dir / METRICS_FILE, resume_step)
        self._run_dir = run_dir
        self._tensorboard = _open_tensorboard(run_dir, resume_step) if tensorboard else None
        self._for_tensorboard: list[tuple[int, dict[str, float | int | str]]] | None = [] if tensorboard else None
        """Rows that are not written yet, (step, values): of one step, or of several after a full disk."""
        self._tracker = tracker

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Append one line: `step` first, then the metrics sorted by name.

        Raises: ValueError for a step that does not rise, a metric called `step` or a value that is no number.
        """
        row = {name: _plain_number(name, metrics[name]) for name in sorted(metrics)}
        self._lines.add(step, row)
        self._lines.flush()
        finite = {name: value for name, value in row.items() if value is not None}
        if self._for_tensorboard is not None:
            # Its scalars have 32 bits, too few for a time since 1970. It records the time by itself.
            self._for_tensorboard.append((step, {k: v for k, v in finite.items() if k != "wall_clock"}))
            self._write_events(self._for_tensorboard)
        if self._tracker is not None:
            self._tracker.log(step, finite)

    def log_samples(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Send a table of samples to the trackers."""
        if self._for_tensorboard is not None:
            self._for_tensorboard.append((step, {name: as_markdown(rows)}))
            self._write_events(self._for_tensorboard)
        if self._tracker is not None:
            self._tracker.log_samples(name, step, rows)

    def flush(self) -> None:
        """Write what could not be written yet. Called before each resume point, so that lines of its steps exist."""
        self._lines.flush()
        if self._for_tensorboard:
            self._write_events(self._for_tensorboard)

    def _write_events(self, rows: list[tuple[int, dict[str, float | int | str]]]) -> None:
        """Write TensorBoard's events. A file of events that has failed once takes no more, so a new one is begun."""
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
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._tracker is not None:
            self._tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Read `run_dir/metrics.jsonl`. Raises: ValueError without the file, and see `read_lines`."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"no {METRICS_FILE} in {run_dir}; expected the run.dir of a run that has logged a step")
    return read_lines(path)


def _plain_number(name: str, value: Any) -> float | int | None:
    if name == "step":
        raise ValueError("got a metric called `step`, which is an argument already: leave it out of metrics")
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


def _open_tensorboard(run_dir: Path, resume_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    purge_step = 0 if resume_step is None else resume_step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)
