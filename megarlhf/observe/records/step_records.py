"""Records of a run's steps, on rank 0: metrics, tables of samples, and in `rl` lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarlhf.observe.records.jsonl import StepLines, require_readable_lines
from megarlhf.observe.records.metrics import METRICS_FILE, MetricsWriter, Tracker
from megarlhf.observe.records.sample_tables import Kind, Row, SampleTables

LENGTHS_FILE = "lengths.jsonl"


@dataclass(frozen=True)
class Records:
    """Open records of a run."""

    metrics: MetricsWriter
    tables: SampleTables
    lengths: StepLines | None
    """Numbers of tokens by step: prompts and responses, one for each sample of training. Of conversations with an
    environment also observed tokens and turns."""

    def show(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        """Write a table of samples of the step, before its metrics are logged."""
        self.tables.write(kind, step, rows)
        self.metrics.log_samples(f"samples/{kind}", step, rows)

    def keep_lengths(
        self, step: int, prompts: Sequence[int], responses: Sequence[int], **further: Sequence[int]
    ) -> None:
        """Write the lengths of the step, before its metrics are logged. `further`: other numbers of each sample"""
        assert self.lengths is not None, "a run whose samples have no lengths of their own"
        self.lengths.add(step, {"prompts": prompts, "responses": responses, **further})
        self.lengths.flush()

    def flush(self) -> None:
        """Write what a full disk has not taken yet."""
        self.metrics.flush()
        self.tables.flush()
        if self.lengths is not None:
            self.lengths.flush()


@contextlib.contextmanager
def open_records(
    run_dir: Path, resume_step: int | None, tracker: Tracker | None, *, lengths: bool
) -> Iterator[Records]:
    """Begin the records, or continue them after `resume_step`. Raises: ValueError, see `require_readable_records`."""
    with MetricsWriter(run_dir, tracker=tracker, resume_step=resume_step) as metrics, contextlib.ExitStack() as stack:
        tables = SampleTables(run_dir, resume_step)
        stack.callback(tables.flush)
        lines = StepLines(run_dir / LENGTHS_FILE, resume_step) if lengths else None
        if lines is not None:
            stack.callback(lines.close)
        yield Records(metrics, tables, lines)


def require_readable_records(run_dir: Path) -> None:
    """Raises: ValueError if an earlier run's records are damaged, so that a resume could not continue them."""
    for name in (METRICS_FILE, LENGTHS_FILE):
        require_readable_lines(run_dir / name)
