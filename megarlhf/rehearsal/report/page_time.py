"""The page's section about time. All of it is estimated by a hardware file."""

from __future__ import annotations

from typing import Any

from megarlhf.observe.report.charts import PALETTE, TEMPLATE
from megarlhf.observe.terminal.progress import format_number
from megarlhf.rehearsal.report.page_parts import folded, long, number, panel, paragraph, table, text
from megarlhf.rehearsal.report.sentences import NO_TIME, shown_steps
from megarlhf.rehearsal.result import Result, StepTime


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def time_section(result: Result, figures: list[dict[str, Any]]) -> str:
    said = (
        f"Estimates by the hardware file “{result.hardware}”: floating-point operations and bytes of every operation, "
        "priced by its figures, and the ranks' traces replayed together, so that a rank waits where another is late. "
        "Nothing was timed."
    )
    parts = ["<h2>Time (estimate)</h2>", paragraph(said)]
    if result.times:
        figures.append(_bars(result))
        chart = f'<div class="chart" data-figure="{len(figures) - 1}"></div>'
        parts += [panel(_steps(result)), panel(chart), _phases(result)]
    else:
        parts.append(paragraph(NO_TIME, "warning"))
    rows = [[key, source] for key, source in result.hardware_sources.items()]
    sources = table([text("figure"), long("source")], rows)
    parts.append(folded(f"Where the figures of “{result.hardware}” come from", panel(sources)))
    return "\n".join(parts)


def _steps(result: Result) -> str:
    names = ["seconds", "tokens trained per second, whole job", "model FLOPs utilisation, rollout apart"]
    names += ["bubble: waiting for others in training", "exposed communication in training"]
    names += ["computing again in training", "forward and backward in training"]
    names += ["exposed communication, seconds, mean of ranks"]
    steps = result.times
    figures = [[format_number(step.seconds), format_number(step.tokens_per_second)] for step in steps]
    for column, step in zip(figures, steps, strict=True):
        column += [percent(step.utilisation), percent(step.bubble), percent(step.exposed)]
        column += [percent(step.recomputation), percent(step.forward_and_backward)]
        column += [format_number(step.communication)]
    lines = [[name, *cells] for name, cells in zip(names, zip(*figures, strict=True), strict=True)]
    if result.rollouts:
        rollouts = [result.rollouts[i] if i < len(result.rollouts) else None for i in range(len(steps))]
        fields = {
            "rollout, slowest engine, seconds": "slowest",
            "rollout, fastest engine, seconds": "fastest",
            "tokens of all responses": "tokens",
            "sequences at once on one engine, most": "most_running",
        }
        lines += [
            [name, *[format_number(getattr(row, field)) if row else "-" for row in rollouts]]
            for name, field in fields.items()
        ]
    return table([text("estimate"), *[number(f"step {step.step}") for step in steps]], lines)


def _bars(result: Result) -> dict[str, Any]:
    """Seconds of each phase, a bar for each step."""
    shown = shown_steps([step.step for step in result.times])
    steps = [step for step in result.times if step.step in shown]
    phases = list(dict.fromkeys(each.phase for step in steps for each in step.phases))
    data = [
        {
            "type": "bar",
            "name": f"step {step.step}",
            "y": phases,
            "x": [{each.phase: each.seconds for each in step.phases}.get(phase) for phase in phases],
            "marker": {"color": PALETTE[index % len(PALETTE)]},
        }
        for index, step in enumerate(steps)
    ]
    layout = {
        "template": TEMPLATE,
        "height": 90 + 24 * len(phases),
        "hovermode": "closest",
        "margin": {"l": 8, "r": 12, "t": 24, "b": 40},
        "xaxis": {"title": {"text": "seconds (estimate)"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return {"data": data, "layout": layout}


def _phases(result: Result) -> str:
    shown = shown_steps([step.step for step in result.times])
    tables = [_of_step(step) for step in result.times if step.step in shown]
    return folded("Phases: computing, waiting, communication", "".join(tables))


def _of_step(step: StepTime) -> str:
    columns = [text("phase"), number("seconds"), number("computing"), number("waiting for others")]
    columns += [number("exposed communication"), number("computing again")]
    columns += [number("copies to and from the host"), number("10^12 operations"), number("utilisation")]
    lines = []
    for each in step.phases:
        figures = (each.seconds, each.busy, each.idle, each.communication, each.again, each.offload, each.flops / 1e12)
        lines.append([each.phase, *map(format_number, figures), percent(each.utilisation)])
    said = (
        f"Step {step.step}: seconds of the rank that spends the most in a phase; what they consist of is the mean over "
        "the replayed ranks. Estimates."
    )
    return panel(paragraph(said) + table(columns, lines))
