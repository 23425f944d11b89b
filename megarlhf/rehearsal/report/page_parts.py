"""Pieces of the page: tables, blocks of which one rank's is shown, colours of the kinds of memory."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarlhf.observe.terminal.progress import format_number
from megarlhf.rehearsal.result import RankResult

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
"""Of each kind of memory, in the order in which they are stacked: what stays lies below what comes and goes."""
UNKNOWN = ("#14b8a6", "#f472b6", "#78716c", "#4338ca")
"""Of kinds that have no colour of their own."""

STYLE = """
.panel + .panel, details + .panel { margin-top: 12px; }
.verdict { border-left: 6px solid #15803d; margin-top: 16px; } .verdict.bad { border-left-color: #b91c1c; }
.verdict p.first { font-size: 18px; margin: 0 0 8px; }
.alarm { border: 1px solid #b91c1c; border-left-width: 6px; background: #fef2f2; }
.alarm h3 { color: #991b1b; } ul { margin: 6px 0; padding-left: 22px; } li { margin: 3px 0; }
td.w { white-space: normal; min-width: 220px; overflow-wrap: anywhere; } tr.top td { font-weight: 600; }
th.of { text-align: center; }
.choose { margin: 10px 0 8px; font-size: 14px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 4px 18px; }
.choose label { max-width: 100%; } select { font: inherit; color: var(--ink); max-width: 100%; padding: 2px 4px; }
h4 { margin: 18px 0 0; font-size: 14px; }
.facts td { vertical-align: top; } .facts td:first-child { color: var(--soft); }
[hidden] { display: none !important; }
@media (max-width: 800px) { main { padding: 20px 12px 48px; } .panel { padding: 10px 12px; } }
"""


@dataclass(frozen=True)
class Column:
    """Of a table; `text`, `number` and `long` make them."""

    name: str
    style: str = ""


def text(name: str) -> Column:
    return Column(name)


def number(name: str) -> Column:
    """Stands to the right."""
    return Column(name, "n")


def long(name: str) -> Column:
    """Is folded into lines."""
    return Column(name, "w")


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[object]],
    *,
    groups: Sequence[tuple[str, int]] = (),
    top: Callable[[Sequence[object]], bool] = lambda row: False,
    style: str = "",
) -> str:
    """groups: a line above the names, (text, columns that it spans); top: rows to be set in bold"""
    names = "".join(_cell("th", column.style, column.name) for column in columns)
    above = "".join(f'<th{" class=of" * bool(name)} colspan="{span}">{html.escape(name)}</th>' for name, span in groups)
    head = f"<tr>{above}</tr>" * bool(groups) + f"<tr>{names}</tr>" * any(column.name for column in columns)
    body = []
    for row in rows:
        assert len(row) == len(columns), f"{len(row)} cells, {len(columns)} columns"
        cells = "".join(_cell("td", column.style, cell) for column, cell in zip(columns, row, strict=True))
        body.append(f'<tr class="top">{cells}</tr>' if top(row) else f"<tr>{cells}</tr>")
    kind = f' class="{style}"' if style else ""
    return f'<div class="scroll"><table{kind}><thead>{head}</thead><tbody>{"".join(body)}</tbody></table></div>'


def _cell(tag: str, style: str, cell: object) -> str:
    shown = format_number(cell) if cell is None or isinstance(cell, int | float) else html.escape(str(cell))
    return f'<{tag} class="{style}">{shown}</{tag}>' if style else f"<{tag}>{shown}</{tag}>"


def paragraph(sentences: str, style: str = "soft") -> str:
    return f'<p class="{style}">{html.escape(sentences)}</p>'


def bullets(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def folded(title: str, inside: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{inside}</details>"


def panel(inside: str) -> str:
    return f'<div class="panel">{inside}</div>'


def for_each_rank(
    ranks: Sequence[RankResult], name: Callable[[RankResult], str], render: Callable[[RankResult], str], more: str = ""
) -> str:
    """One block for each rank, of which the first is shown until another is chosen; a choice holds for the page.

    more: other things to choose, beside it
    """
    options = "".join(f'<option value="{rank.rank}">{html.escape(name(rank))}</option>' for rank in ranks)
    chooser = f'<div class="choose"><label>Rank <select class="rank">{options}</select></label>{more}</div>'
    blocks = [
        f'<div class="of-rank" data-rank="{rank.rank}"{" hidden" if index else ""}>{render(rank)}</div>'
        for index, rank in enumerate(ranks)
    ]
    return chooser + "\n".join(blocks)


def colours_of(kinds: Sequence[str]) -> dict[str, str]:
    """In the order of the stack."""
    known = [kind for kind in COLOURS if kind in kinds]
    unknown = sorted(set(kinds) - set(COLOURS))
    return {kind: COLOURS[kind] for kind in known} | {
        kind: UNKNOWN[index % len(UNKNOWN)] for index, kind in enumerate(unknown)
    }
