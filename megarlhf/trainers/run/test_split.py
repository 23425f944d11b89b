"""Metrics of `data.test`, which no choice is made on."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.terminal.progress import format_number
from megarlhf.trainers.run.session import Session


def log_test_metrics(session: Session, metrics: Mapping[str, Metric]) -> None:
    """The figures of `data.test`, where there are any; they are of the weights after the last step."""
    if not metrics:
        return
    figures = ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
    best = session.best_export
    of_best = "" if best is None else f". Those of {best}: megarlhf eval of a model there, with data.train = data.test"
    session.note(f"data.test, after the last step: {figures}{of_best}")


def prefix_test(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Rename metrics of held-out data to those of `data.test`, on which no choice is made."""
    return {f"test_{name.removeprefix('eval_')}": value for name, value in metrics.items()}
