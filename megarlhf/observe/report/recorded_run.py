"""The record of one run directory, as a report reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.records.run_directory import CONFIG_FILE, written_by
from megarlhf.observe.records.sample_tables import ShownTables, read_shown
from megarlhf.observe.report.chart_list import KIND_TITLES, Kind


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run's name, kind, rows of metrics.jsonl, configuration (YAML text), tables of samples, and directory."""

    name: str
    kind: Kind
    rows: Sequence[dict[str, Any]]
    config: str | None
    tables: ShownTables = field(default_factory=ShownTables)
    path: Path | None = None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The configuration as a tree; empty without one. Raises: ValueError for a damaged one."""
        try:
            tree = yaml.safe_load(self.config or "")
        except yaml.YAMLError as error:
            raise ValueError(
                f"{CONFIG_FILE} of the run {self.name} is damaged ({error}); restore it, or remove it"
            ) from error
        return tree if isinstance(tree, Mapping) else {}

    @property
    def reward_is_learned(self) -> bool:
        """Whether every reward comes from a reward model."""
        rewards = self.settings.get("rewards") or []
        return bool(rewards) and all(reward["kind"] in ("model", "classifier") for reward in rewards)

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
        command = written_by(config)
        runs.append(
            RecordedRun(
                name=f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name,
                kind=command if command in KIND_TITLES else run_kind(rows),
                path=path,
                rows=rows,
                config=config.read_text(encoding="utf-8") if config.is_file() else None,
                tables=read_shown(path),
            )
        )
    return runs


def run_kind(rows: Iterable[dict[str, Any]]) -> Kind:
    """The command that wrote these rows, by the names of its metrics: for a run without a configuration."""
    names = {name for row in rows for name in row}
    if names & {"reward_mean", "policy_loss"}:
        return "rl"
    if names & {"reward_margin", "eval_reward_margin"}:
        return "dpo"
    return "rm" if names & {"pair_accuracy", "eval_pair_accuracy"} else "sft"


def _is_plottable(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
