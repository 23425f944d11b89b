"""Plotly figures of a report, as plain dictionaries of data and layout.

One run: a colour for each metric. Several runs over each other: a colour for each run, a dash for each metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarlhf.observe.report.chart_list import CHARTS, Chart
from megarlhf.observe.report.recorded_run import RecordedRun

PALETTE = ("#2563eb", "#d97706", "#059669", "#b91c1c", "#7c3aed", "#0e7490", "#be185d", "#4d7c0f")
DASHES = ("solid", "dot", "dash", "longdash", "dashdot")
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


def draw(figures: list[dict[str, Any]], chart: Chart, runs: Sequence[RecordedRun]) -> int:
    """Append the figure of a chart to those of a page, and return its index."""
    figures.append(figure(chart, runs))
    return len(figures) - 1


def charts_of(runs: Sequence[RecordedRun]) -> tuple[list[Chart], list[Chart]]:
    """Charts for which something was logged, and one for every metric that none of them shows.

    `wall_clock` is left out: the summary shows it.
    """
    logged = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    listed = [chart for chart in CHARTS if set(chart.metrics + chart.right) & set(logged)]
    covered = {"wall_clock", *(name for chart in listed for name in chart.metrics + chart.right)}
    return listed, [Chart(name, (name,)) for name in logged if name not in covered]


def figure(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """The plotly figure of a chart: `{"data": [...], "layout": {...}}`, ready for JSON."""
    if chart.stacked and len(runs) > 1:
        return _phase_totals(chart, runs)
    data = []
    for run_index, run in enumerate(runs):
        for metric_index, metric in enumerate(chart.metrics + chart.right):
            if run.series(metric):
                colour, dash = (metric_index, 0) if len(runs) == 1 else (run_index, metric_index)
                trace = _trace(chart, run, metric, PALETTE[colour % len(PALETTE)], DASHES[dash % len(DASHES)])
                data.append({**trace, "name": metric if len(runs) == 1 else f"{run.name} · {metric}"})
    layout = _layout(chart, runs) | (_mark_of_best(chart.mark_best, runs[0]) if len(runs) == 1 else {})
    if any("yaxis" in trace for trace in data):
        title = {"text": chart.right_axis}
        right = {"title": title, "overlaying": "y", "tickmode": "auto", "side": "right", "showgrid": False}
        layout |= {"yaxis2": right, "margin": {"r": 64}}
    return {"data": data, "layout": layout}


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
    return {**trace, "yaxis": "y2"} if metric in chart.right else trace


def _phase_totals(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Mean seconds per step of each phase, as one stacked bar for each run."""
    data = []
    for index, metric in enumerate(chart.metrics):
        values = [[value for _, value in run.finite(metric)] for run in runs]
        means = [sum(of_run) / len(of_run) if of_run else None for of_run in values]
        marker = {"color": PALETTE[index % len(PALETTE)]}
        data.append({"type": "bar", "name": metric, "y": [run.name for run in runs], "x": means, "marker": marker})
    layout = _layout(chart, runs) | {"barmode": "stack", "hovermode": "closest", "yaxis": {}}
    return {"data": data, "layout": layout | {"xaxis": {"title": {"text": "mean seconds per step"}}}}


def _layout(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    yaxis: dict[str, Any] = {"title": {"text": chart.axis}}
    values = [value for run in runs for metric in chart.metrics for _, value in run.finite(metric)]
    if chart.log_if_positive and values and min(values) > 0:
        yaxis |= {"type": "log", "dtick": 1}
    elif values and min(values) == max(values) != 0:
        # Around a constant plotly would show +-1, where a learning rate of 1e-4 reads as 0.
        yaxis["range"] = sorted((0.0, 2.0 * values[0]))
    height, xaxis = 340 if chart.wide else 270, {"title": {"text": "step"}}
    return {"template": TEMPLATE, "height": height, "xaxis": xaxis, "yaxis": yaxis}


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
