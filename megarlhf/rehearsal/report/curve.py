"""The curve of live memory of one rank: thinned out without losing a peak, as a figure of plotly."""

from __future__ import annotations

import html
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megarlhf.observe.report.charts import TEMPLATE
from megarlhf.rehearsal.report.page_parts import colours_of
from megarlhf.rehearsal.report.sentences import GIB, gib
from megarlhf.rehearsal.result import RankResult

Point = tuple[float, dict[str, int]]
HEIGHT = 620
APART = 1e-6
"""Between two points of one moment, of the whole time: plotly stacks points by where they stand."""

SCRIPT = """
const OPTIONS = {responsive: true, displaylogo: false, displayModeBar: false};
const shown = element => element.offsetParent !== null;
const axis = document.querySelector('select.axis');
const at = () => axis.value === 'time' ? 0 : 1;

function marks(figure, range, width) {
  const {borders, end} = figure.layout.meta, shapes = [...figure.layout.shapes];
  const annotations = [...figure.layout.annotations];
  let named = null;
  borders.forEach(([seconds, number, phase, step, begins], index) => {
    const begin = at() ? number : seconds, next = (borders[index + 1] || end)[at()];
    const from = Math.max(begin, range[0]), to = Math.min(next, range[1]);
    const pixels = (to - from) / (range[1] - range[0]) * width;
    const wide = pixels >= 13, text = step === named ? phase : `<b>${step}</b> ${phase}`;
    if (wide || begins) {
      const line = begins ? {color: '#1b2130', width: 1.4} : {color: '#8a92a3', width: 0.6, dash: 'dot'};
      shapes.push({type: 'line', x0: begin, x1: begin, yref: 'paper', y0: 0, y1: 1, line});
    }
    if (!wide) return;
    named = step;
    const flat = pixels > 6.2 * text.replace(/<[^>]*>/g, '').length + 6;
    annotations.push({x: from, xanchor: 'left', xshift: flat ? 1 : -3, y: 1, yref: 'paper', yanchor: 'bottom', text,
                      showarrow: false, textangle: flat ? 0 : -90, font: {size: 10.5}});
  });
  return {shapes, annotations};
}

function drawCurve(element) {
  const figure = FIGURES[Number(element.dataset.figure)], {start, end, x, names, places} = figure.layout.meta;
  const width = () => element.clientWidth - figure.layout.margin.l - figure.layout.margin.r;
  const whole = [start[at()], end[at()]], across = at() ? x.map((_, index) => index) : x;
  const kinds = figure.data.slice(0, -1), last = figure.data.at(-1);
  const parts = index => kinds.filter(kind => kind.y[index]).sort((a, b) => b.y[index] - a.y[index])
    .map(kind => '<br>' + kind.y[index].toFixed(2) + '  ' + kind.name).join('');
  const text = places.map((place, index) => names[place] + parts(index));
  const data = [...kinds.map(kind => ({...kind, x: across})), {...last, x: across, text}];
  const xaxis = {...figure.layout.xaxis, range: whole, ticksuffix: at() ? '' : ' s'};
  Plotly.react(element, data, {...figure.layout, xaxis, ...marks(figure, whole, width())}, OPTIONS);
  element.removeAllListeners('plotly_relayout');
  element.on('plotly_relayout', change => {
    if (change.annotations) return;
    const range = change['xaxis.autorange'] ? whole : element.layout.xaxis.range.map(Number);
    Plotly.relayout(element, {...marks(figure, range, width()), 'xaxis.range': range});
  });
}

function draw() {
  for (const element of document.querySelectorAll('.chart')) {
    const figure = FIGURES[Number(element.dataset.figure)];
    if (!shown(element)) continue;
    if (element.classList.contains('curve')) { drawCurve(element); }
    else { Plotly.react(element, figure.data, figure.layout, OPTIONS); }
  }
}

for (const select of document.querySelectorAll('select.rank')) {
  select.addEventListener('change', () => {
    document.querySelectorAll('select.rank').forEach(other => { other.value = select.value; });
    document.querySelectorAll('.of-rank').forEach(block => { block.hidden = block.dataset.rank !== select.value; });
    draw();
  });
}
axis.addEventListener('change', draw);
draw();
"""
"""Draws all figures of the page; of a curve the names of phases as far as there is room for them."""


def thinned(points: Sequence[Point], borders: Sequence[float], limit: int) -> list[Point]:
    """About `limit` points: of equal stretches, none of which crosses a border, the highest and the lowest."""
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


def figure(rank: RankResult, capacity: int, limit: int) -> dict[str, Any]:
    """Stacked by kind. Where points and phases are stands once, in `layout.meta`, from which the script fills it in."""
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
    """Where points and phases are, by time and by number."""
    span = (times[-1] - times[0] if times else 0.0) or 1.0
    x: list[float] = []
    for seconds in times:
        x.append(round(max(seconds, x[-1] + APART * span), 7) if x else seconds)
    starts = [seconds for seconds, _, _ in borders]
    marks = []
    for index, (seconds, step, phase) in enumerate(borders):
        begins = not index or step != borders[index - 1][1]
        words = f"step {step}" if step else "start"
        marks.append([round(seconds, 7), bisect_left(times, seconds), html.escape(phase), words, begins])
    return {
        "x": x,
        "borders": marks,
        "start": [x[0] if x else 0.0, 0],
        "end": [x[-1] if x else 1.0, max(1, len(x) - 1)],
        "names": ["", *[html.escape(f"step {step}, {phase}" if step else phase) for _, step, phase in borders]],
        "places": [bisect_right(starts, seconds) for seconds in times],
    }


def _layout(rank: RankResult, capacity: int) -> dict[str, Any]:
    """With two lines: what the device has, and what of it is left for tensors."""
    margin = rank.need - rank.peak
    lines = [
        (capacity, "#b91c1c", "bottom", f"the device: {gib(capacity)} GiB"),
        (capacity - margin, "#b45309", "top", f"less the margin: {gib(capacity - margin)} GiB"),
    ]
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for nbytes, colour, side, words in lines if capacity else ():
        y, line = nbytes / GIB, {"color": colour, "width": 1.6, "dash": "dash"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line})
        text = {"text": words, "font": {"color": colour, "size": 11}, "bgcolor": "rgba(255,255,255,0.8)"}
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
