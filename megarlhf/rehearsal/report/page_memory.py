"""The page's sections about memory: curve, phases, ranks, largest storages, margin, host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarlhf.rehearsal.fake_device.ledger import LargeStorage
from megarlhf.rehearsal.report.curve import figure
from megarlhf.rehearsal.report.page_parts import (
    colours_of,
    folded,
    for_each_rank,
    long,
    number,
    panel,
    paragraph,
    table,
    text,
)
from megarlhf.rehearsal.report.sentences import (
    at_peak,
    by_need,
    consists,
    counted,
    free,
    gib,
    of_resume_point,
    shown_steps,
    stages,
    when,
)
from megarlhf.rehearsal.result import PhaseRow, RankResult, Result

MAX_POINTS = 1500
"""Of the curve of one rank."""
MAX_POINTS_OF_ALL = 24_000
MAX_RANKS = 20
"""Whose curves and tables the page has; the file of JSON has all."""
KINDS_IN_A_ROW = 4


def shown_ranks(result: Result) -> list[RankResult]:
    """The tightest first."""
    return by_need(result)[:MAX_RANKS]


def rank_name(result: Result, rank: RankResult) -> str:
    """As it is chosen."""
    return ", ".join(filter(None, [f"{rank.rank}: {stages(rank)}", f"needs {gib(rank.need)} GiB", free(result, rank)]))


def curve_section(result: Result, figures: list[dict[str, Any]]) -> str:
    """The figures are added to `figures`."""
    ranks = shown_ranks(result)
    limit = min(MAX_POINTS, MAX_POINTS_OF_ALL // len(ranks))

    def render(rank: RankResult) -> str:
        figures.append(figure(rank, result.capacity, limit))
        return panel(f'<div class="chart curve" data-figure="{len(figures) - 1}"></div>')

    axis = (
        '<label>Across <select class="axis"><option value="order">order of events, short phases widened</option>'
        '<option value="time">estimated time</option></select></label>'
    )
    said = (
        "Live memory of one rank's tensors from the start to the end of the last rehearsed step, by kind. Between the "
        "two dashed lines lies the margin: what rises above the lower one does not fit. Each point of the curve is "
        "equally wide, so that short phases are seen; the other axis is estimated time. Points are left out, but no "
        "phase loses its peak."
    )
    return f"<h2>Memory over the steps</h2>{paragraph(said)}" + for_each_rank(
        ranks, lambda rank: rank_name(result, rank), render, axis
    )


def phases_section(result: Result) -> str:
    said = (
        "GiB of tensors when a phase begins, at its peak and when it ends. The first step differs from later ones: the "
        "optimizer's state, for example, is made in its first update."
    )
    ranks = shown_ranks(result)
    body = for_each_rank(ranks, lambda rank: rank_name(result, rank), lambda rank: _phases(rank, rank is ranks[0]))
    points = "".join(map(paragraph, of_resume_point(result)))
    return f"<h2>Memory by phase</h2>{paragraph(said)}{points}{body}"


def _phases(rank: RankResult, with_all_storages: bool) -> str:
    steps = shown_steps([row.step for row in rank.memory])
    rows = {(row.step, row.phase): row for row in rank.memory}
    phases = dict.fromkeys(row.phase for row in rank.memory if row.step in steps)
    columns = [text("phase"), *[number(name) for _ in steps for name in ("begins", "peak", "ends")]]
    columns.append(long("the higher of these peaks consists of"))
    body = []
    for phase in phases:
        of_steps = [rows.get((step, phase)) for step in steps]
        cells = [cell for row in of_steps for cell in _begins_peak_ends(row)]
        highest = max((row for row in of_steps if row), key=lambda row: row.peak)
        body.append([phase, *cells, consists(highest.by_kind, KINDS_IN_A_ROW)])
    groups = [("", 1), *[(f"step {step}", 3) for step in steps], ("", 1)]
    parts = [table(columns, body, groups=groups, top=lambda row: bool(steps) and row[0] == rank.peak_at[1])]
    if before := [row for row in rank.memory if not row.step]:
        names = [text("before the first step"), number("begins"), number("peak"), number("ends"), long("at the peak")]
        lines = [[row.phase, *_begins_peak_ends(row), consists(row.by_kind, KINDS_IN_A_ROW)] for row in before]
        parts.append(table(names, lines))
    peak = at_peak(rank)
    parts.append(f"<h4>The largest storages at the peak of rank {rank.rank}</h4>")
    parts.append(paragraph(f"At {when(peak.step, peak.phase)}. The line is the one of this program that made them."))
    parts.append(_storages([(peak, storage) for storage in peak.largest], with_phase=False))
    parts.append(folded(f"Every phase of rank {rank.rank} by kind", _by_kind(rank)))
    if with_all_storages:
        pairs = [(row, storage) for row in rank.memory for storage in row.largest]
        parts.append(folded(f"The largest storages of every phase of rank {rank.rank}", _storages(pairs, True)))
    return panel("".join(parts))


def _begins_peak_ends(row: PhaseRow | None) -> tuple[str, str, str]:
    return ("-", "-", "-") if row is None else (gib(row.start), gib(row.peak), gib(row.end))


def _storages(pairs: Sequence[tuple[PhaseRow, LargeStorage]], with_phase: bool) -> str:
    columns = [text("kind"), number("GiB"), text("shape"), text("dtype"), text("made by")]
    if with_phase:
        columns = [text("step"), text("phase"), *columns]
    lines: list[list[object]] = []
    for row, each in pairs:
        place = [row.step or "-", row.phase] if with_phase else []
        shape = " x ".join(map(str, each.shape)) or "scalar"
        lines.append([*place, each.kind, gib(each.nbytes), shape, each.dtype, each.where])
    return table(columns, lines)


def _by_kind(rank: RankResult) -> str:
    kinds = list(colours_of([kind for row in rank.memory for kind in row.by_kind]))
    columns = [text("step"), text("phase"), number("peak"), *map(number, kinds), number("host")]
    lines = [
        [row.step or "-", row.phase, gib(row.peak), *_sizes(row, kinds), gib(row.host_peak)] for row in rank.memory
    ]
    said = "GiB at the peak of each phase; on the right the program's tensors on the host."
    return paragraph(said) + table(columns, lines)


def ranks_section(result: Result) -> str:
    columns = [number("rank"), text("stages"), number("stands for"), long("why this one"), number("tensors, peak")]
    columns += [text("at"), number("margin"), number("needs"), number("free")]
    ranks = by_need(result)
    lines = [_rank_row(result, rank) for rank in ranks]
    said = (
        f"{counted(len(ranks), 'rank')} of {result.world_size} rehearsed, the tightest first; a rank stands for those "
        "that hold the same stages, itself among them. GiB."
    )
    body = panel(table(columns, lines[:MAX_RANKS]))
    if rest := lines[MAX_RANKS:]:
        said += f" Curves and tables on this page are those of the {MAX_RANKS} tightest."
        body += folded(counted(len(rest), "other rank"), panel(table(columns, rest)))
    kinds = list(colours_of([kind for rank in ranks for kind in at_peak(rank).by_kind]))
    parts = [[rank.rank, *_sizes(at_peak(rank), kinds)] for rank in ranks[:MAX_RANKS]]
    peaks = panel("<h3>What each peak consists of, GiB</h3>" + table([number("rank"), *map(number, kinds)], parts))
    return f"<h2>Ranks</h2>{paragraph(said)}{body}{peaks}"


def _rank_row(result: Result, rank: RankResult) -> list[object]:
    left = gib(result.capacity - rank.need) if result.capacity else "-"
    sizes = [gib(rank.peak), when(*rank.peak_at), gib(rank.need - rank.peak), gib(rank.need), left]
    return [rank.rank, stages(rank), rank.stands_for, rank.why, *sizes]


def _sizes(row: PhaseRow, kinds: Sequence[str]) -> list[str]:
    return [gib(row.by_kind[kind]) if row.by_kind.get(kind) else "-" for kind in kinds]


def margin_section(result: Result) -> str:
    said = (
        "What no rehearsal can see, because it is no tensor. Each item is a formula of what was counted, with numbers "
        "that can be set (section margin) and where they are from; those marked assumed have no source but judgement."
    )
    ranks = shown_ranks(result)
    return f"<h2>The margin</h2>{paragraph(said)}" + for_each_rank(ranks, lambda r: rank_name(result, r), _margin)


def _margin(rank: RankResult) -> str:
    rows: list[list[object]] = [[row.name, gib(row.nbytes), row.scaling, row.source] for row in rank.margin]
    rows.append(["together", gib(sum(row.nbytes for row in rank.margin)), "", ""])
    columns = [text("item"), number("GiB"), long("formula"), long("source")]
    return panel(table(columns, rows, top=lambda row: row is rows[-1]))


def host_section(result: Result) -> str:
    rows: list[list[object]] = [[row.name, gib(row.nbytes), row.source] for row in result.host]
    rows.append(["one rank", gib(sum(row.nbytes for row in result.host)), ""])
    rows.append([f"a node of {min(result.ranks_per_node, result.world_size)} ranks", gib(result.host_per_node), ""])
    said = "GiB of the node's own memory, item by item for one rank, and for all ranks of a node together."
    body = panel(table([text("item"), number("GiB"), long("source")], rows, top=lambda row: row in rows[-2:]))
    return f"<h2>Host memory</h2>{paragraph(said)}{body}"
