"""`megarlhf report`: one HTML file with figures, curves, samples and configurations of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megarlhf.observe.records.run_directory import CONFIG_FILE
from megarlhf.observe.records.sample_tables import Row, describe_sample, written
from megarlhf.observe.report.chart_list import KIND_TITLES, SUMMARY
from megarlhf.observe.report.charts import charts_of, draw
from megarlhf.observe.report.html_page import check_replaceable, document, fill, write_whole, written_by
from megarlhf.observe.report.recorded_run import RecordedRun, read_runs
from megarlhf.observe.report.result import model_of, sentence
from megarlhf.observe.terminal.progress import format_duration, format_number

REPORT = "report"
"""The command, as its pages name it."""
MAX_ROWS = 12
"""Rows of a table of samples."""
MAX_CHARACTERS = 1200
"""Length of a prompt or response above which its middle is left out."""


def write_report(run_dirs: Sequence[Path], out: Path, *, title: str, first: Sequence[str] = ()) -> None:
    """Write the report of run directories, of any commands, to the HTML file `out`.

    Runs of one kind share their charts. Every metric is shown: one without a chart is under "More".

    first: HTML above the runs; its tables may have the class `samples`

    Raises: ValueError for no run, and see `read_runs` and `check_replaceable`.
    """
    if not run_dirs:
        raise ValueError("a report of no run; give at least one run directory (run.dir of a finished or live run)")
    check_replaceable(out, written_by(REPORT), "report of megarlhf")
    write_whole(out, report_page(read_runs([Path(run_dir) for run_dir in run_dirs]), title=title, first=first))


def report_page(runs: Sequence[RecordedRun], *, title: str, first: Sequence[str] = ()) -> str:
    """The whole page."""
    figures: list[dict[str, Any]] = []
    runs = sorted(runs, key=lambda run: list(KIND_TITLES).index(run.kind))
    by_kind = {kind: [run for run in runs if run.kind == kind] for kind in dict.fromkeys(run.kind for run in runs)}
    body = fill(
        "report.html",
        runs=runs,
        sections=[(KIND_TITLES[kind], alike, *charts_of(alike)) for kind, alike in by_kind.items()],
        draw=partial(draw, figures),
        result=sentence,
        model=model_of,
        summary=_summary,
        facts=_facts,
        not_finite=_not_finite,
        evaluations=_evaluations,
        training=lambda rows: [(row, [row]) for row in rows[:MAX_ROWS]],
        describe=describe_sample,
        shortened=shortened,
        written=lambda row: written(row, shortened),
        no_config=f"no {CONFIG_FILE} in the run directory",
    )
    return document(title, REPORT, [*first, *(["<h2>Runs</h2>"] if first else []), body], figures)


def _summary(run: RecordedRun) -> list[tuple[object, ...]]:
    """Metric, first, last and best value, and the step of the best, of each figure of the summary."""
    rows: list[tuple[object, ...]] = []
    for metric, best in SUMMARY.items():
        if points := run.finite(metric):
            step, value = (min if best == "lowest" else max)(points, key=lambda point: point[1])
            show = partial(format_number, largest=max(abs(value) for _, value in points))
            cells = ("-", "-") if best == "neither" else ("worst " * (best == "worst") + show(value), step)
            rows.append((metric, show(points[0][1]), Markup("<b>{}</b>").format(show(points[-1][1])), *cells))
    return rows or [("no figure of its own logged",)]


def _facts(run: RecordedRun) -> str:
    """Kind and steps of a run, their time (`seconds`, or the sum of the phases), and the span of its records."""
    facts = [KIND_TITLES[run.kind], f"{run.rows[-1]['step']} steps"]
    metrics = run.metrics()
    names = [name for name in metrics if name == "seconds"] or [n for n in metrics if n.startswith("seconds_")]
    if names:
        facts.append(f"{format_duration(sum(value for name in names for _, value in run.finite(name)))} in steps")
    if times := [datetime.fromtimestamp(value, timezone.utc) for _, value in run.finite("wall_clock")]:
        facts.append(f"{times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M} UTC")
    return ", ".join(facts)


def _not_finite(run: RecordedRun) -> str:
    """Names of metrics with a null, which NaN and infinities are written as."""
    counts = {name: sum(value is None for _, value in run.series(name)) for name in run.metrics()}
    return ", ".join(f"{name} at {count} steps" for name, count in counts.items() if count)


def _evaluations(run: RecordedRun) -> tuple[list[str], list[tuple[Row, list[Row | None]]]]:
    """A column for each evaluation, and the prompts of the latest one with their response in each."""
    tables = run.tables.evaluations
    by_prompt = [{(row["sample"], row["prompt"]): row for row in rows} for rows in tables.values()]
    latest = list(tables.values())[-1][:MAX_ROWS]
    rows = [(row, [earlier.get((row["sample"], row["prompt"])) for earlier in by_prompt]) for row in latest]
    return [f"step {step}" for step in tables], rows


def shortened(text: str) -> str:
    """The text, without its middle where it is long."""
    half = MAX_CHARACTERS // 2
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
