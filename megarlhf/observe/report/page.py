"""One HTML file with the curves of several runs. It needs no network: plotly's script stands inside, once."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.records.run_directory import CONFIG_FILE
from megarlhf.observe.records.sample_tables import read_shown
from megarlhf.observe.report.chart_list import KIND_TITLES, SUMMARY, Chart, Kind
from megarlhf.observe.report.charts import RecordedRun, charts_of, figure, kind_of
from megarlhf.observe.report.html_page import DRAW, check_replaceable, document, write_whole, written_by
from megarlhf.observe.report.samples import STYLE as STYLE_OF_SAMPLES
from megarlhf.observe.report.samples import section_of_samples
from megarlhf.observe.terminal.progress import format_duration, format_number

REPORT = "report"
"""The command, as its pages name it."""


def write_report(run_dirs: Sequence[Path], out: Path, *, title: str, first: Sequence[str] = ()) -> None:
    """Write the report of these run directories (any mix of sft, rm and rl) to the HTML file `out`.

    `first`: HTML that stands above the runs; its tables of class `samples` look as those of the report.

    Runs of one kind share their charts. Every metric in a metrics.jsonl is shown: one without a chart of its
    own stands under "More". Raises: ValueError for no run, for a directory without metrics.jsonl and
    for a run without a step.
    """
    if not run_dirs:
        raise ValueError("a report of no run; give at least one run directory (run.dir of a finished or live run)")
    check_replaceable(out, written_by(REPORT), "report of megarlhf")
    page = render(distinct([read_run(Path(run_dir)) for run_dir in run_dirs]), title=title, first=first)
    write_whole(out, page)


def read_run(run_dir: Path) -> RecordedRun:
    """The record of one run directory."""
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"{run_dir} has an empty metrics.jsonl: the run has not finished a step; report it later")
    config = run_dir / CONFIG_FILE
    text = config.read_text(encoding="utf-8") if config.is_file() else None
    tables = read_shown(run_dir)
    return RecordedRun(name=run_dir.resolve().name, kind=kind_of(rows), rows=rows, config=text, tables=tables)


def distinct(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Number the runs whose directories have the same name (a/rl and b/rl)."""
    names = [run.name for run in runs]
    result = []
    for index, run in enumerate(runs):
        repeated = names.count(run.name) > 1
        number = names[: index + 1].count(run.name)
        result.append(replace(run, name=f"{run.name} ({number})") if repeated else run)
    return result


def render(runs: Sequence[RecordedRun], *, title: str, first: Sequence[str] = ()) -> str:
    """The whole page."""
    figures: list[dict[str, Any]] = []
    runs = sorted(runs, key=lambda run: list(KIND_TITLES).index(run.kind))
    kinds: list[Kind] = list(dict.fromkeys(run.kind for run in runs))
    sections = [_section(kind, [run for run in runs if run.kind == kind], figures) for kind in kinds]
    runs_below = ["<h2>Runs</h2>"] if first else []
    parts = [*first, *runs_below, _summary(runs), *sections, section_of_samples(runs), _configs(runs)]
    return document(title, REPORT, parts, figures, style=STYLE_OF_SAMPLES, script=DRAW)


def _summary(runs: Sequence[RecordedRun]) -> str:
    """The figures of every run: first, last and best."""
    body = []
    for run in runs:
        lines = [_summary_cells(run, metric) for metric in SUMMARY[run.kind] if run.finite(metric)]
        lines = lines or ['<td colspan="5">no figure of its own logged</td>']
        steps = f"{KIND_TITLES[run.kind]}, {run.rows[-1]['step']} steps{_duration(run)}{_when(run)}"
        head = (
            f'<td rowspan="{len(lines)}"><div class="run">{html.escape(run.name)}</div>'
            f'<div class="soft">{steps}</div>{_not_finite(run)}</td>'
        )
        body.append(f'<tr class="first">{head}{lines[0]}</tr>')
        body.extend(f"<tr>{line}</tr>" for line in lines[1:])
    names = ("first", "last", "best", "at step")
    columns = "".join(f'<th class="n">{name}</th>' for name in names)
    head = f"<thead><tr><th>run</th><th>figure</th>{columns}</tr></thead>"
    return f'<div class="panel scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _summary_cells(run: RecordedRun, metric: str) -> str:
    points = run.finite(metric)
    cells = [format_number(points[0][1]), f"<b>{format_number(points[-1][1])}</b>"]
    best = SUMMARY[run.kind][metric]
    step, value = (min if best == "lowest" else max)(points, key=lambda point: point[1])
    cells += ["-", "-"] if best == "neither" else ["worst " * (best == "worst") + format_number(value), str(step)]
    return f"<td>{html.escape(metric)}</td>" + "".join(f'<td class="n">{cell}</td>' for cell in cells)


def _duration(run: RecordedRun) -> str:
    """The time of all steps: `seconds`, or the sum of the phases."""
    names = [name for name in run.metrics() if name == "seconds"]
    names = names or [name for name in run.metrics() if name.startswith("seconds_")]
    total = sum(value for name in names for _, value in run.finite(name))
    return f", {format_duration(total)} in steps" if names else ""


def _when(run: RecordedRun) -> str:
    """From the first logged step to the last one, of all starts."""
    times = [datetime.fromtimestamp(value, timezone.utc) for _, value in run.finite("wall_clock")]
    return f", {times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M} UTC" if times else ""


def _not_finite(run: RecordedRun) -> str:
    """A warning that names the metrics with a null, which is what NaN and infinities are written as."""
    counts = {name: sum(value is None for _, value in run.series(name)) for name in run.metrics()}
    not_finite = [f"{html.escape(name)} at {count} steps" for name, count in counts.items() if count]
    return f'<div class="soft warning">not finite: {", ".join(not_finite)}</div>' if not_finite else ""


def _section(kind: Kind, runs: Sequence[RecordedRun], figures: list[dict[str, Any]]) -> str:
    own, more = charts_of(kind, runs)
    names = ", ".join(html.escape(run.name) for run in runs)
    head = f'<h2>{KIND_TITLES[kind]}</h2>\n<p class="soft">{names}</p>'
    parts = [head, f'<div class="grid">{"".join(panel(chart, runs, figures) for chart in own)}</div>']
    if more:
        panels = "".join(panel(chart, runs, figures) for chart in more)
        parts.append(
            f'<details><summary>More: {len(more)} other metrics</summary><div class="grid">{panels}</div></details>'
        )
    return "\n".join(parts)


def panel(chart: Chart, runs: Sequence[RecordedRun], figures: list[dict[str, Any]]) -> str:
    figures.append(figure(chart, runs))
    hint = f'<div class="soft">{html.escape(chart.hint)}</div>' if chart.hint else ""
    return (
        f'<div class="panel{" wide" if chart.wide else ""}"><h3>{html.escape(chart.title)}</h3>{hint}'
        f'<div class="chart" data-figure="{len(figures) - 1}"></div></div>'
    )


def _configs(runs: Sequence[RecordedRun]) -> str:
    parts = ["<h2>Resolved configuration</h2>"]
    for run in runs:
        text = run.config if run.config is not None else f"no {CONFIG_FILE} in the run directory"
        parts.append(
            f'<details class="panel"><summary>{html.escape(run.name)}</summary><pre>{html.escape(text)}</pre></details>'
        )
    return "\n".join(parts)
