"""A rehearsal's result as one HTML file (from `page.html.jinja`) and as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megarlhf.observe.report.html_page import check_replaceable, document, write_whole, written_by
from megarlhf.observe.terminal.progress import format_duration, format_number
from megarlhf.rehearsal.report.curve import colours_of, memory_curve, time_bars
from megarlhf.rehearsal.report.selection import (
    HOST,
    bytes_by_carrier,
    end_steps,
    peak_row,
    sum_messages,
    tightest_first,
)
from megarlhf.rehearsal.report.sentences import (
    ESTIMATE,
    NO_TIME,
    NOT_MEASURED,
    gib,
    kinds,
    moment,
    percent,
    quantity,
    rank_name,
    resume_point,
    size,
    stages,
    verdict,
    waits_for_cache,
)
from megarlhf.rehearsal.result import PhaseRow, RankResult, Result

REHEARSE = "rehearse"
"""The command, as its pages name it."""
_OWN_JSON = '"hardware_sources": '
"""A key that no other file has."""
MAX_POINTS = 1500
"""Points of one rank's curve."""
MAX_POINTS_OF_ALL = 24_000
MAX_RANKS = 20
"""Ranks whose curves and tables are on the page. The JSON file has all."""
KINDS_IN_A_ROW = 4
STEP_FIGURES = (
    ("seconds", "seconds", format_number),
    ("tokens trained per second, whole job", "tokens_per_second", format_number),
    ("model FLOPs utilisation, rollout apart", "utilisation", percent),
    ("bubble: waiting for others in training", "bubble", percent),
    ("exposed communication in training", "exposed", percent),
    ("computing again in training", "recomputation", percent),
    ("forward and backward in training", "forward_and_backward", percent),
    ("exposed communication, seconds, mean of ranks", "communication", format_number),
)
"""(label, field of `StepTime`, how it is shown)"""
ROLLOUT_FIGURES = (
    ("rollout, slowest engine, seconds", "slowest"),
    ("rollout, fastest engine, seconds", "fastest"),
    ("tokens of all responses", "tokens"),
    ("sequences at once on one engine, most", "most_running"),
    ("tokens of prompts, and of responses that go on", "computed"),
    ("waiting for room in an engine's cache, seconds", "waited"),
)


def check_out(folder: Path) -> None:
    """Refuse, before a rehearsal begins, to replace a file that is not ours.

    Raises: ValueError where `folder` holds such a file under a name that `write` would use.
    """
    check_replaceable(folder / "rehearsal.json", _OWN_JSON, "file of megarlhf rehearse")
    check_replaceable(folder / "rehearsal.html", written_by(REHEARSE), "page of megarlhf rehearse")


def write(result: Result, folder: Path) -> list[Path]:
    """Write `Result.as_json` and a page that needs no network. Returns their paths.

    Raises: ValueError as `check_out`, and for a number that JSON does not have (NaN, infinity).
    """
    check_out(folder)
    texts = {
        folder / "rehearsal.json": json.dumps(result.as_json(), allow_nan=False) + "\n",
        folder / "rehearsal.html": render(result),
    }
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def render(result: Result) -> str:
    """The whole page."""
    ranks = tightest_first(result)
    shown = ranks[:MAX_RANKS]
    limit = min(MAX_POINTS, MAX_POINTS_OF_ALL // len(shown))
    figures = [memory_curve(rank, result.capacity, limit) for rank in shown]
    if result.times:
        figures.append(time_bars([step for step in result.times if step.step in end_steps(result.times)]))
    folder = Path(__file__).parent
    body = (
        _environment(folder)
        .get_template("page.html.jinja")
        .render(
            result=result,
            ranks=ranks,
            shown=shown,
            max_ranks=MAX_RANKS,
            kinds_in_a_row=KINDS_IN_A_ROW,
            all_messages=[row for rank in result.ranks for row in rank.messages],
            host=HOST,
            step_figures=STEP_FIGURES,
            rollout_figures=ROLLOUT_FIGURES,
            rollouts=(result.rollouts + [None] * len(result.times))[: len(result.times)],
            not_measured=NOT_MEASURED,
            estimate=ESTIMATE,
            no_time=NO_TIME,
            config=yaml.safe_dump(result.config, sort_keys=False, allow_unicode=True),
        )
    )
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"Rehearsal of megarlhf {result.command} on {quantity(result.world_size, 'rank')}"
    return document(title, REHEARSE, [body], figures, style=style, script=script)


def _environment(folder: Path) -> Environment:
    """Templates of a folder, with the functions that they call."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions: tuple[Any, ...] = (
        _cell,
        _columns,
        _kinds_of,
        _messages_by_step,
        _phases_of,
        _sizes,
        _start_peak_end,
        _step_groups,
    )
    functions += (
        bytes_by_carrier,
        end_steps,
        waits_for_cache,
        format_duration,
        gib,
        kinds,
        moment,
        peak_row,
        percent,
        quantity,
    )
    functions += (rank_name, resume_point, size, stages, verdict)
    by_name = {function.__name__.lstrip("_"): function for function in functions}
    environment.filters |= by_name
    environment.globals |= by_name
    return environment


def _step_groups(steps: Sequence[int], span: int) -> list[tuple[str, int]]:
    return [(f"step {step}", span) for step in steps]


def _cell(value: object) -> str:
    return format_number(value) if value is None or isinstance(value, int | float) else str(value)


def _columns(rows: Sequence[Any], field: str, show: Any = format_number) -> list[str]:
    """One cell for each row; a dash for a row that is not there."""
    return ["-" if row is None else show(getattr(row, field)) for row in rows]


def _phases_of(rank: RankResult, steps: Sequence[int]) -> list[tuple[str, list[PhaseRow | None]]]:
    rows = {(row.step, row.phase): row for row in rank.memory}
    phases = dict.fromkeys(row.phase for row in rank.memory if row.step in steps)
    return [(phase, [rows.get((step, phase)) for step in steps]) for phase in phases]


def _start_peak_end(rows: Iterable[PhaseRow | None]) -> list[str]:
    cells = []
    for row in rows:
        cells += ["-"] * 3 if row is None else [gib(row.start), gib(row.peak), gib(row.end)]
    return cells


def _kinds_of(rows: Iterable[PhaseRow]) -> list[str]:
    """Kinds of memory in the rows, in the order of the curve's stack."""
    return list(colours_of([kind for row in rows for kind in row.by_kind]))


def _sizes(row: PhaseRow, names: Sequence[str]) -> list[str]:
    return [gib(row.by_kind[name]) if row.by_kind.get(name) else "-" for name in names]


def _messages_by_step(rank: RankResult, steps: Sequence[int]) -> list[tuple[list[object], list[object]]]:
    """(key; count and bytes in each step) of equal messages, the most bytes in the last step first."""
    by_step = [sum_messages(row for row in rank.messages if row.step == step) for step in steps]
    keys = dict.fromkeys(key for sums in reversed(by_step) for key in sums)
    lines: list[tuple[list[object], list[object]]] = []
    for key in keys:
        counts: list[object] = []
        for sums in by_step:
            count, nbytes = sums.get(key, (0, 0))
            counts += [count, size(nbytes)] if count else ["-", "-"]
        lines.append(([*key], counts))
    return lines
