"""Metrics of `data.test`, on which no decision depends."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.terminal.progress import format_number
from megarlhf.trainers.run.session import Session


def log_test_metrics(session: Session, metrics: Mapping[str, Metric]) -> None:
    """Show the metrics of `data.test` after the last step, if there are any."""
    if not metrics:
        return
    figures = ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
    best = None if session.exports is None else session.exports.best_path
    hint = "" if best is None else f". For {best}: megarlhf eval of a model there, with data.train = data.test"
    session.note(f"data.test, after the last step: {figures}{hint}")


def prefix_test(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Rename metrics of held-out data to metrics of `data.test`."""
    return {f"test_{name.removeprefix('eval_')}": value for name, value in metrics.items()}
