"""Which curves a report shows, and how one becomes a plotly figure (plain dictionaries: data and layout).

A `RecordedRun` is the record of one run directory. `figure` draws the metrics of a chart for the runs of one kind, over
each other. One run: a colour per metric. Several runs: a colour per run, a dash per metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarlhf.observe.records.sample_tables import ShownTables
from megarlhf.observe.report.chart_list import CHARTS, Chart, Kind

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
"""How every chart looks where it does not say otherwise."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The record of one run: its name, kind, lines of metrics.jsonl and configuration (YAML text)."""

    name: str
    kind: Kind
    rows: Sequence[dict[str, Any]]
    config: str | None
    tables: ShownTables = field(default_factory=ShownTables)
    """Of samples."""

    def series(self, metric: str) -> list[tuple[int, float | None]]:
        """(step, value) where the metric was logged; None where it was not finite."""
        return [(row["step"], row[metric]) for row in self.rows if metric in row and _plottable(row[metric])]

    def finite(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) where the metric was logged and finite."""
        return [(step, value) for step, value in self.series(metric) if value is not None]

    def metrics(self) -> list[str]:
        """Every numeric metric that was ever logged, in order of appearance."""
        names = {name: None for row in self.rows for name, value in row.items() if name != "step" and _plottable(value)}
        return list(names)


def kind_of(rows: Iterable[dict[str, Any]]) -> Kind:
    """Which command wrote these lines, by the names of its metrics."""
    names = {name for row in rows for name in row}
    if names & {"reward_mean", "policy_loss"}:
        return "rl"
    if names & {"reward_margin", "eval_reward_margin"}:
        return "dpo"
    if names & {"pair_accuracy", "eval_pair_accuracy"}:
        return "rm"
    return "sft"


def charts_of(kind: Kind, runs: Sequence[RecordedRun]) -> tuple[list[Chart], list[Chart]]:
    """The charts of a kind that have something to show, and one for every metric that none of them has; `wall_clock`
    stands in the summary."""
    logged = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    own = [chart for chart in CHARTS[kind] if set(chart.metrics + chart.right) & set(logged)]
    covered = {"wall_clock", *(name for chart in own for name in chart.metrics + chart.right)}
    return own, [Chart(title=name, metrics=(name,)) for name in logged if name not in covered]


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
    return {"data": data, "layout": _layout(chart, runs, has_right=any("yaxis" in trace for trace in data))}


def _trace(chart: Chart, run: RecordedRun, metric: str, colour: str, dash: str) -> dict[str, Any]:
    points = run.series(metric)
    sparse = len(points) * 2 <= len(run.rows) or len(points) < 3
    trace: dict[str, Any] = {
        "type": "scatter",
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "mode": "lines+markers" if sparse else "lines",
        "line": {"color": colour, "dash": dash},
        "marker": {"color": colour},
    }
    if chart.stacked:
        trace |= {"stackgroup": "phases", "mode": "none", "fillcolor": colour}
    return {**trace, "yaxis": "y2"} if metric in chart.right else trace


def _phase_totals(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Several runs side by side: mean seconds per step of each phase, as stacked bars."""
    data = []
    for index, metric in enumerate(chart.metrics):
        values = [[value for _, value in run.finite(metric)] for run in runs]
        means = [sum(of_run) / len(of_run) if of_run else None for of_run in values]
        marker = {"color": PALETTE[index % len(PALETTE)]}
        data.append({"type": "bar", "name": metric, "y": [run.name for run in runs], "x": means, "marker": marker})
    layout = _layout(chart, runs, has_right=False) | {"barmode": "stack", "hovermode": "closest", "yaxis": {}}
    return {"data": data, "layout": layout | {"xaxis": {"title": {"text": "mean seconds per step"}}}}


def _layout(chart: Chart, runs: Sequence[RecordedRun], *, has_right: bool) -> dict[str, Any]:
    yaxis: dict[str, Any] = {"title": {"text": chart.axis}}
    values = [value for run in runs for metric in chart.metrics for _, value in run.finite(metric)]
    if chart.log_if_positive and values and min(values) > 0:
        yaxis |= {"type": "log", "dtick": 1}
    elif values and min(values) == max(values) != 0:
        # Around a constant plotly would show +-1, where a learning rate of 1e-4 reads as 0.
        yaxis["range"] = sorted((0.0, 2.0 * values[0]))
    layout = {
        "template": TEMPLATE,
        "height": 340 if chart.wide else 270,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": yaxis,
        **_mark_of_best(chart, runs),
    }
    if has_right:
        title = {"text": chart.right_axis}
        right = {"title": title, "overlaying": "y", "tickmode": "auto", "side": "right", "showgrid": False}
        layout |= {"yaxis2": right, "margin": {"r": 64}}
    return layout


def _mark_of_best(chart: Chart, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """A dotted line where the metric was highest, unless it was at the run's end; for one run."""
    metric = chart.mark_best
    points = runs[0].finite(metric) if len(runs) == 1 and metric is not None else []
    step, value = max(points, key=lambda point: point[1], default=(0, 0.0))
    if not points or value == points[-1][1]:
        return {}
    line = {"color": TEXT, "width": 1, "dash": "dot"}
    text = {"text": f"best {metric} {value:.4g}, step {step}", "showarrow": False}
    place = {"x": step, "xanchor": "left", "xshift": 4, "yref": "paper", "y": 0.02, "yanchor": "bottom"}
    return {
        "shapes": [{"type": "line", "x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1, "line": line}],
        "annotations": [{**text, **place}],
    }


def _plottable(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
