"""The page's figures, as plotly takes them: the curve of a rank's live memory, and the seconds of phases."""

from __future__ import annotations

import html
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megarlhf.observe.report.charts import PALETTE, TEMPLATE
from megarlhf.rehearsal.report.sentences import GIB, gib
from megarlhf.rehearsal.result import RankResult, StepTime

Point = tuple[float, dict[str, int]]
HEIGHT = 620
APART = 1e-6
"""Distance of two points of one moment, as a share of the whole time: plotly stacks points that have the same x."""

COLOURS = {
    "parameters": "#1e3a8a",
    "gradients": "#2563eb",
    "main parameters": "#60a5fa",
    "optimizer state": "#0e7490",
    "engine's weights": "#166534",
    "engine's cache": "#65a30d",
    "kernels' work space": "#57534e",
    "experience": "#a16207",
    "activations": "#dc2626",
    "logits and kernels": "#f97316",
    "buckets": "#7c3aed",
    "buffers": "#c084fc",
    "checks": "#db2777",
    "optimizer's temporaries": "#eab308",
    "others": "#94a3b8",
}
"""Colour of each kind of memory, in the order of the stack: what stays is below what comes and goes."""
UNKNOWN = ("#14b8a6", "#f472b6", "#78716c", "#4338ca")
"""Colours of kinds that have none of their own."""


def colours_of(kinds: Sequence[str]) -> dict[str, str]:
    """The colour of each of these kinds, in the order of the stack."""
    unknown = sorted(set(kinds) - set(COLOURS))
    return {kind: colour for kind, colour in COLOURS.items() if kind in kinds} | {
        kind: UNKNOWN[index % len(UNKNOWN)] for index, kind in enumerate(unknown)
    }


def thinned(points: Sequence[Point], borders: Sequence[float], limit: int) -> list[Point]:
    """About `limit` points: the highest and the lowest of equal stretches, none of which crosses a border.

    The peak of every stretch between two borders stays.
    """
    points = sorted(points, key=lambda point: point[0])
    if len(points) <= limit:
        return points
    times, totals = [seconds for seconds, _ in points], [sum(kinds.values()) for _, kinds in points]
    stretch = max(1, -(-2 * len(points) // limit))
    cuts = {0, len(points), *range(0, len(points), stretch), *(bisect_left(times, border) for border in borders)}
    kept = {0, len(points) - 1}
    ordered = sorted(cuts)
    for start, end in pairwise(ordered):
        kept.add(max(range(start, end), key=totals.__getitem__))
        kept.add(min(range(start, end), key=totals.__getitem__))
    return [points[index] for index in sorted(kept)]


def memory_curve(rank: RankResult, capacity: int, limit: int) -> dict[str, Any]:
    """Memory stacked by kind. `layout.meta` has the places of points and phases once; the script fills them in."""
    borders = sorted(rank.phases_at, key=lambda border: border[0])
    points = thinned(rank.curve, [seconds for seconds, _, _ in borders], limit)
    colours = colours_of([kind for _, kinds in points for kind in kinds])
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "name": kind,
            "y": [round(kinds[kind] / GIB, 3) if kinds.get(kind) else None for _, kinds in points],
            "stackgroup": "memory",
            "mode": "none",
            "fillcolor": colour,
            "hoverinfo": "skip",
            "hovertemplate": "",  # that of the template would be shown in spite of `skip`
        }
        for kind, colour in colours.items()
    ]
    together = {
        "type": "scatter",
        "name": "all",
        "y": [round(sum(kinds.values()) / GIB, 3) for _, kinds in points],
        "mode": "lines",
        "line": {"color": "#1b2130", "width": 1},
        "hovertemplate": "<b>%{y:.2f} GiB</b> in %{text}<extra></extra>",
        "hoverlabel": {"align": "left", "bgcolor": "white"},
        "showlegend": False,
    }
    meta = _places([seconds for seconds, _ in points], borders)
    return {"data": [*data, together], "layout": {**_layout(rank, capacity), "meta": meta}}


def _places(times: Sequence[float], borders: Sequence[tuple[float, int, str]]) -> dict[str, Any]:
    span = (times[-1] - times[0] if times else 0.0) or 1.0
    x: list[float] = []
    for seconds in times:
        x.append(round(max(seconds, x[-1] + APART * span), 7) if x else seconds)
    starts = [seconds for seconds, _, _ in borders]
    marks = []
    for index, (seconds, step, phase) in enumerate(borders):
        begins = not index or step != borders[index - 1][1]
        name = f"step {step}" if step else "start"
        marks.append([round(seconds, 7), bisect_left(times, seconds), html.escape(phase), name, begins])
    return {
        "x": x,
        "borders": marks,
        "start": [x[0] if x else 0.0, 0],
        "end": [x[-1] if x else 1.0, max(1, len(x) - 1)],
        "names": ["", *[html.escape(f"step {step}, {phase}" if step else phase) for _, step, phase in borders]],
        "places": [bisect_right(starts, seconds) for seconds in times],
    }


def _layout(rank: RankResult, capacity: int) -> dict[str, Any]:
    """Layout with two lines: the device's memory, and the part of it that is left for tensors."""
    margin = rank.need - rank.peak
    lines = [
        (capacity, "#b91c1c", "bottom", f"the device: {gib(capacity)} GiB"),
        (capacity - margin, "#b45309", "top", f"less the margin: {gib(capacity - margin)} GiB"),
    ]
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for nbytes, colour, side, label in lines if capacity else ():
        y, line = nbytes / GIB, {"color": colour, "width": 1.6, "dash": "dash"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line})
        text = {"text": label, "font": {"color": colour, "size": 11}, "bgcolor": "rgba(255,255,255,0.8)"}
        annotations.append(
            {**text, "xref": "paper", "x": 1, "xanchor": "right", "y": y, "yanchor": side, "showarrow": False}
        )
    return {
        "template": TEMPLATE,
        "height": HEIGHT,
        "hovermode": "x",
        "margin": {"l": 52, "r": 12, "t": 128, "b": 40},
        "xaxis": {"hoverformat": ".4~g"},
        "yaxis": {"title": {"text": "GiB"}, "range": [0, max(capacity, rank.peak) / GIB * 1.07]},
        "legend": {"orientation": "h", "x": 0, "y": -0.09, "yanchor": "top", "traceorder": "normal"},
        "shapes": shapes,
        "annotations": annotations,
    }


def time_bars(steps: Sequence[StepTime]) -> dict[str, Any]:
    """Seconds of each phase, a bar for each step."""
    phases = list(dict.fromkeys(phase.phase for step in steps for phase in step.phases))
    data = []
    for index, step in enumerate(steps):
        seconds = {phase.phase: phase.seconds for phase in step.phases}
        colour = PALETTE[index % len(PALETTE)]
        x = [seconds.get(phase) for phase in phases]
        data.append({"type": "bar", "name": f"step {step.step}", "y": phases, "x": x, "marker": {"color": colour}})
    layout = {
        "template": TEMPLATE,
        "height": 90 + 24 * len(phases),
        "hovermode": "closest",
        "margin": {"l": 8, "r": 12, "t": 24, "b": 40},
        "xaxis": {"title": {"text": "seconds (estimate)"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return {"data": data, "layout": layout}
