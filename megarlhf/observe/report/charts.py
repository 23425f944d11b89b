"""Plotly figures of a report, as plain dictionaries of data and layout.

One run: a colour for each metric. Several runs over each other: a colour for each run, a dash for each metric. The
legend is HTML beside the figure, so that it takes no room from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf.observe.report.chart_list import CHARTS, REWARD, Chart, axis_of
from megarlhf.observe.report.recorded_run import RecordedRun

PALETTE = ("#2563eb", "#d97706", "#059669", "#b91c1c", "#7c3aed", "#0e7490", "#be185d", "#4d7c0f")
DASHES = {"solid": "", "dot": "2 3", "dash": "6 3", "longdash": "10 4", "dashdot": "6 3 2 3"}
"""Plotly's names of dashes, and SVG's lengths of their strokes and gaps."""
TEXT = "#3c4351"
_AXIS = {"gridcolor": "#e7e9ee", "linecolor": "#c9ced8", "showline": True, "zeroline": False}
_AXIS |= {"automargin": True, "exponentformat": "power"}
TEMPLATE: dict[str, Any] = {
    "layout": {
        "font": {"family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 12, "color": TEXT},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 56, "r": 20, "t": 8, "b": 40},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    },
    "data": {
        "scatter": [{"line": {"width": 2}, "marker": {"size": 7}, "hovertemplate": "%{y:.4~g}"}],
        "bar": [{"orientation": "h", "hovertemplate": "%{x:.4~g} s"}],
    },
}
"""Defaults of every chart."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend, which is a run or a metric. A click on it hides the traces that are of it by `meta`."""

    part: Literal["run", "metric"]
    name: str
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Drawn:
    """A chart of a page: the index of its figure, its legend, and remarks on metrics that are drawn once."""

    index: int
    keys: Sequence[Key]
    remarks: Sequence[str]


def draw(figures: list[dict[str, Any]], chart: Chart, runs: Sequence[RecordedRun]) -> Drawn:
    """Append the figure of a chart to those of a page."""
    figures.append(figure(chart, runs))
    runs_of: dict[str, list[str]] = {}
    for run in runs:
        for metric, other in equal_metrics(chart, run).items():
            runs_of.setdefault(f"{metric} is the same as {other}", []).append(run.name)
    remarks = [text + f" ({', '.join(names)})" * (len(runs) > 1) for text, names in runs_of.items()]
    return Drawn(len(figures) - 1, legend(chart, figures[-1]["data"], len(runs) > 1), remarks)


def legend(chart: Chart, data: Sequence[dict[str, Any]], several_runs: bool) -> list[Key]:
    """The runs if there are several, and the metrics unless there are several runs and one metric."""
    runs = {trace["meta"]["run"]: trace["marker"]["color"] for trace in data}
    metrics = {trace["meta"]["metric"]: trace for trace in data}
    by_run = several_runs and not chart.stacked
    keys = [Key("run", name, colour) for name, colour in runs.items() if by_run]
    if by_run and len(metrics) == 1:
        return keys
    for name in (name for name in chart.metrics + chart.right if name in metrics):
        trace = metrics[name]
        dash = trace.get("line", {}).get("dash", "solid")
        keys.append(Key("metric", name, TEXT if by_run else trace["marker"]["color"], DASHES[dash]))
    return keys


def charts_of(runs: Sequence[RecordedRun]) -> tuple[list[Chart], list[Chart]]:
    """Charts for which something was logged, and one for every metric that none of them shows.

    `wall_clock` is left out: the summary shows it.
    """
    logged = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    kind = runs[0].kind
    of_kind = [chart for chart in CHARTS if kind in (chart.kinds or (kind,))]
    listed = [chart for chart in of_kind if set(chart.metrics + chart.right) & set(logged)]
    covered = {"wall_clock", *(name for chart in listed for name in chart.metrics + chart.right)}
    return listed, [Chart(name, (name,), axis=axis_of(name, kind)) for name in logged if name not in covered]


def equal_metrics(chart: Chart, run: RecordedRun) -> dict[str, str]:
    """Metrics of a chart whose values in this run are those of another one of it, which alone is drawn.

    GRPO's held-out reward is the share of right answers, for example, and `kl` is `kl_k1` or `kl_k3`.
    Parts of a stack are all drawn.
    """
    names = [name for name in (*chart.metrics, *chart.right) if run.series(name) and not chart.stacked]
    equal: dict[str, str] = {}
    for index, name in enumerate(names):
        if other := next((other for other in names[index + 1 :] if _are_equal(run, name, other)), None):
            equal[name] = other
    return equal


def _are_equal(run: RecordedRun, name: str, other: str) -> bool:
    """Whether both have the same values, as far as fp32 shows, at the same steps, and are not only zeros."""
    values, others = run.series(name), run.series(other)
    if [step for step, _ in values] != [step for step, _ in others] or not any(value for _, value in values):
        return False
    pairs = [(value, beside) for (_, value), (_, beside) in zip(values, others, strict=True)]
    return all(
        value == beside if value is None or beside is None else math.isclose(value, beside, rel_tol=1e-6, abs_tol=1e-9)
        for value, beside in pairs
    )


def _is_right(chart: Chart, run: RecordedRun) -> bool:
    """Whether a metric of the left axis is the same as one of the right axis."""
    return any(other in chart.right for name, other in equal_metrics(chart, run).items() if name in chart.metrics)


def figure(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """The plotly figure of a chart: `{"data": [...], "layout": {...}}`, ready for JSON."""
    if chart.stacked and len(runs) > 1:
        return _phase_totals(chart, runs)
    data, learned = [], []
    drawn = [run for run in runs if any(map(run.series, chart.metrics))]
    is_right = bool(drawn) and all(_is_right(chart, run) for run in drawn)  # a metric has one axis for all runs
    for run_index, run in enumerate(runs):
        equal = equal_metrics(chart, run)
        for metric_index, metric in enumerate(chart.metrics + chart.right):
            if run.series(metric) and metric not in equal:
                colour, dash = (metric_index, 0) if len(runs) == 1 else (run_index, metric_index)
                trace = _trace(chart, run, metric, PALETTE[colour % len(PALETTE)], list(DASHES)[dash % len(DASHES)])
                name = metric if len(runs) == 1 else f"{run.name} · {metric}"
                if is_right or metric in chart.right:
                    trace["yaxis"] = "y2"
                else:
                    learned.append(run.reward_is_learned)
                data.append({**trace, "name": name, "meta": {"run": run.name, "metric": metric}})
    layout = _layout(chart, runs) | (_mark_of_best(chart.mark_best, runs[0]) if len(runs) == 1 else {})
    if chart == REWARD and learned and all(learned):
        layout["yaxis"]["title"]["text"] = f"learned {chart.axis}"
    return {"data": data, "layout": _with_right_axis(chart, data, layout)}


def _with_right_axis(chart: Chart, data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    """The layout with a second axis, if something is drawn on it. Traces that all belong to it get the first axis."""
    on_right = [trace for trace in data if "yaxis" in trace]
    if not on_right:
        return layout
    title = {"text": chart.right_axis}
    if len(on_right) == len(data):
        for trace in data:
            del trace["yaxis"]
        return layout | {"yaxis": {"title": title}}
    right = {"title": title, "overlaying": "y", "tickmode": "auto", "side": "right", "showgrid": False}
    return layout | {"yaxis2": right, "margin": {"r": 64}}


def _trace(chart: Chart, run: RecordedRun, metric: str, colour: str, dash: str) -> dict[str, Any]:
    points = run.series(metric)
    is_sparse = len(points) * 2 <= len(run.rows) or len(points) < 3
    trace: dict[str, Any] = {
        "type": "scatter",
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "mode": "lines+markers" if is_sparse else "lines",
        "line": {"color": colour, "dash": dash},
        "marker": {"color": colour},
    }
    if chart.stacked:
        trace |= {"stackgroup": "phases", "mode": "none", "fillcolor": colour}
    return trace


def _phase_totals(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Mean seconds per step of each phase, as one stacked bar for each run."""
    data = []
    for index, metric in enumerate(chart.metrics):
        values = [[value for _, value in run.finite(metric)] for run in runs]
        means = [sum(of_run) / len(of_run) if of_run else None for of_run in values]
        marker = {"color": PALETTE[index % len(PALETTE)]}
        bars = {"type": "bar", "name": metric, "y": [run.name for run in runs], "x": means, "marker": marker}
        data.append({**bars, "meta": {"run": None, "metric": metric}})
    layout = _layout(chart, runs) | {"barmode": "stack", "hovermode": "closest", "yaxis": {"title": {"text": "run"}}}
    return {"data": data, "layout": layout | {"xaxis": {"title": {"text": "mean seconds per step"}}}}


def _layout(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    yaxis: dict[str, Any] = {"title": {"text": chart.axis}}
    values = [value for run in runs for metric in chart.metrics for _, value in run.finite(metric)]
    if chart.log_if_positive and values and min(values) > 0:
        yaxis |= {"type": "log", "dtick": 1}
    elif values and min(values) == max(values) != 0:
        # Around a constant plotly would show +-1, where a learning rate of 1e-4 reads as 0.
        yaxis["range"] = sorted((0.0, 2.0 * values[0]))
    xaxis: dict[str, Any] = {"title": {"text": "step"}}
    steps = [step for run in runs for metric in chart.metrics + chart.right for step, _ in run.series(metric)]
    if steps and max(steps) - min(steps) < 10:
        xaxis["dtick"] = 1  # plotly would put ticks between steps
    if values and max(map(abs, values)) >= 10_000:
        yaxis |= {"exponentformat": "none", "separatethousands": True}
    height = 300 if chart.wide else 240
    return {"template": TEMPLATE, "height": height, "showlegend": False, "xaxis": xaxis, "yaxis": yaxis}


def _mark_of_best(metric: str | None, run: RecordedRun) -> dict[str, Any]:
    """A dotted line at the step where the metric was highest. Nothing is marked if that was at the run's end."""
    points = run.finite(metric) if metric else []
    step, best = max(points, key=lambda point: point[1], default=(0, 0.0))
    if not points or best == points[-1][1]:
        return {}
    line = {"type": "line", "x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1}
    text = {"text": f"best {metric} {best:.4g}, step {step}", "showarrow": False, "x": step, "xanchor": "left"}
    place = {"xshift": 4, "yref": "paper", "y": 0.02, "yanchor": "bottom"}
    return {"shapes": [line | {"line": {"color": TEXT, "width": 1, "dash": "dot"}}], "annotations": [text | place]}
