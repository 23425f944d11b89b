"""A rehearsal's answer as one HTML file, and as one of JSON."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import yaml

from megarlhf.observe.report.html_page import check_replaceable, document, write_whole, written_by
from megarlhf.observe.terminal.progress import format_duration
from megarlhf.rehearsal.report.curve import SCRIPT
from megarlhf.rehearsal.report.page_memory import (
    curve_section,
    host_section,
    margin_section,
    phases_section,
    ranks_section,
)
from megarlhf.rehearsal.report.page_parts import STYLE, bullets, folded, long, number, panel, paragraph, table, text
from megarlhf.rehearsal.report.page_time import time_section
from megarlhf.rehearsal.report.page_wire import wire_section
from megarlhf.rehearsal.report.sentences import ESTIMATE, at_peak, consists, counted, gib, how_counted, verdict
from megarlhf.rehearsal.result import Result

REHEARSE = "rehearse"
"""The command, as its pages name it."""
_OWN_JSON = '"hardware_sources": '
"""A key that no other file has."""


def check_out(folder: Path) -> None:
    """To be asked before a rehearsal begins. Raises: ValueError where something stands in `folder` that `write` would
    replace and that is not ours."""
    check_replaceable(folder / "rehearsal.json", _OWN_JSON, "file of megarlhf rehearse")
    check_replaceable(folder / "rehearsal.html", written_by(REHEARSE), "page of megarlhf rehearse")


def write(result: Result, folder: Path) -> list[Path]:
    """`Result.as_json`, and a page that needs no network. Returns what was written. Raises: see `check_out`; ValueError
    for a number that JSON has not (NaN, infinity)."""
    check_out(folder)
    texts = {
        folder / "rehearsal.json": json.dumps(result.as_json(), allow_nan=False) + "\n",
        folder / "rehearsal.html": render(result),
    }
    for path, words in texts.items():
        write_whole(path, words)
    return list(texts)


def render(result: Result) -> str:
    """The whole page."""
    figures: list[dict[str, Any]] = []
    parts = [
        _verdict(result),
        curve_section(result, figures),
        phases_section(result),
        ranks_section(result),
        margin_section(result),
        wire_section(result),
        time_section(result, figures),
        host_section(result),
        _assumed(result),
        _config(result),
    ]
    title = f"Rehearsal of megarlhf {result.command} on {counted(result.world_size, 'rank')}"
    return document(title, REHEARSE, parts, figures, style=STYLE, script=SCRIPT)


def _verdict(result: Result) -> str:
    first, *others = verdict(result)
    good = result.fits and not result.refusals and not result.faults
    peak = at_peak(result.tightest_rank)
    sentences = [*others, f"At its tightest moment it holds, in GiB: {consists(peak.by_kind)}."]
    head = f'<p class="first">{html.escape(first)}</p>' + "".join(paragraph(sentence, "") for sentence in sentences)
    parts = [f'<div class="panel verdict{"" if good else " bad"}">{head}{paragraph(how_counted())}</div>']
    if result.refusals:
        parts.append(_alarm("The run would not start", result.refusals))
    if result.faults:
        parts.append(_alarm("Ranks do not fit together", result.faults))
    parts.append(panel(_facts(result)))
    return "\n".join(parts)


def _alarm(title: str, sentences: list[str]) -> str:
    return f'<div class="panel alarm"><h3>{html.escape(title)}</h3>{bullets(sentences)}</div>'


def _facts(result: Result) -> str:
    nodes = -(-result.world_size // result.ranks_per_node)
    rows = [
        ["job", f"megarlhf {result.command}, {counted(result.world_size, 'rank')}, {counted(nodes, 'node')}"],
        *[[role, words] for role, words in result.layouts.items()],
        ["device", f"{gib(result.capacity)} GiB" if result.capacity else "no size was given"],
        ["hardware file", result.hardware],
    ]
    if result.times:
        last = result.times[-1]
        rows.append([f"step {last.step}", f"{last.seconds:,.1f} seconds (estimate)"])
    tool = f"{format_duration(result.tool_seconds)} and at most {result.tool_gib:.2f} GiB on this machine, measured"
    rows.append(["rehearsal", f"{counted(result.steps, 'step')} on {counted(len(result.ranks), 'rank')}: {tool}"])
    return table([text(""), long("")], rows, style="facts")


def _assumed(result: Result) -> str:
    said = (
        "Numbers that only a device would know, and that the program reads: each was answered, with the reason. "
        f"Any other such place would have ended the rehearsal. {ESTIMATE}"
    )
    columns = [long("where"), long("what it reads"), text("answer"), long("reason"), number("times")]
    rows = [[row.where, row.what, row.answer, row.reason, row.count] for row in result.assumptions]
    parts = ["<h2>What was assumed</h2>", paragraph(said)]
    parts.append(panel(table(columns, rows)) if rows else paragraph("No number had to be answered.", ""))
    if result.notes:
        parts.append(f"<h4>What stood in for what</h4>{bullets(result.notes)}")
    return "\n".join(parts)


def _config(result: Result) -> str:
    dumped = yaml.safe_dump(result.config, sort_keys=False, allow_unicode=True)
    inside = f"<pre>{html.escape(dumped)}</pre>"
    return "<h2>Resolved configuration</h2>" + panel(folded("The configuration that was rehearsed", inside))
