"""The record of one run directory, as a report reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.records.run_directory import CONFIG_FILE
from megarlhf.observe.records.sample_tables import ShownTables, read_shown
from megarlhf.observe.report.chart_list import Kind


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run's name, kind, rows of metrics.jsonl, configuration (YAML text) and tables of samples."""

    name: str
    kind: Kind
    rows: Sequence[dict[str, Any]]
    config: str | None
    tables: ShownTables = field(default_factory=ShownTables)

    def series(self, metric: str) -> list[tuple[int, float | None]]:
        """(step, value) where the metric was logged; None where it was not finite."""
        return [(row["step"], row[metric]) for row in self.rows if metric in row and _is_plottable(row[metric])]

    def finite(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) where the metric was logged and finite."""
        return [(step, value) for step, value in self.series(metric) if value is not None]

    def metrics(self) -> list[str]:
        """Every numeric metric that was ever logged, in order of appearance."""
        logged = (item for row in self.rows for item in row.items())
        return list(dict.fromkeys(name for name, value in logged if name != "step" and _is_plottable(value)))


def read_runs(run_dirs: Sequence[Path]) -> list[RecordedRun]:
    """Read run directories. Runs whose directories have the same name (a/rl and b/rl) are numbered.

    Raises: ValueError for a directory without metrics.jsonl, and for a run without a step.
    """
    names = [path.resolve().name for path in run_dirs]
    runs = []
    for index, (path, name) in enumerate(zip(run_dirs, names, strict=True)):
        rows, config = read_metrics(path), path / CONFIG_FILE
        if not rows:
            raise ValueError(f"{path} has an empty metrics.jsonl: the run has not finished a step; report it later")
        runs.append(
            RecordedRun(
                name=f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name,
                kind=run_kind(rows),
                rows=rows,
                config=config.read_text(encoding="utf-8") if config.is_file() else None,
                tables=read_shown(path),
            )
        )
    return runs


def run_kind(rows: Iterable[dict[str, Any]]) -> Kind:
    """The command that wrote these rows, by the names of its metrics."""
    names = {name for row in rows for name in row}
    if names & {"reward_mean", "policy_loss"}:
        return "rl"
    if names & {"reward_margin", "eval_reward_margin"}:
        return "dpo"
    return "rm" if names & {"pair_accuracy", "eval_pair_accuracy"} else "sft"


def _is_plottable(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
