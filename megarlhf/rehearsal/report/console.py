"""A rehearsal's answer on the terminal, short; the page has the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from megarlhf.observe.terminal.progress import format_number, table
from megarlhf.rehearsal.report.page_time import percent
from megarlhf.rehearsal.report.page_wire import size, summed, way
from megarlhf.rehearsal.report.sentences import (
    ESTIMATE,
    NO_TIME,
    NOT_MEASURED,
    at_peak,
    by_need,
    consists,
    counted,
    gib,
    of_resume_point,
    shown_steps,
    stages,
    verdict,
    when,
)
from megarlhf.rehearsal.result import PhaseRow, RankResult, Result

MAX_PHASES, MAX_RANKS, MAX_WIRE, MAX_SENTENCES, MAX_KINDS = 14, 4, 5, 5, 4


def print_result(result: Result, console: Console) -> None:
    """About 60 lines: verdict, memory of the tightest rank, ranks, time, wire, refusals, faults and notes."""
    good = result.fits and not result.refusals and not result.faults
    first, *others = verdict(result)
    console.print(Text(first, style="bold green" if good else "bold red"))
    rank = result.tightest_rank
    moment = f"Its tightest moment, in GiB: {consists(at_peak(rank).by_kind, 6)}."
    for sentence in [*others, moment, f"{NOT_MEASURED} {ESTIMATE}"]:
        console.print(Text(sentence))
    _sentences(console, "The run would not start", result.refusals, "red")
    _sentences(console, "Ranks do not fit together", result.faults, "red")
    _memory(result, rank, console)
    for sentence in of_resume_point(result):
        console.print(Text(sentence))
    _ranks(result, console)
    _times(result, console)
    _wire(rank, console)
    _sentences(console, "What stood in for what", result.notes, "")
    if result.assumptions:
        reads = sum(row.count for row in result.assumptions)
        console.print(Text(f"{counted(reads, 'number')} had to be assumed; the page says where and why."))


def _sentences(console: Console, title: str, sentences: Sequence[str], style: str) -> None:
    if not sentences:
        return
    console.print(Text(f"{title}:", style=f"bold {style}".strip()))
    for sentence in sentences[:MAX_SENTENCES]:
        console.print(Text(f"- {sentence}", style=style))
    if rest := sentences[MAX_SENTENCES:]:
        console.print(Text(f"- and {counted(len(rest), 'other')}, on the page"))


def _memory(result: Result, rank: RankResult, console: Console) -> None:
    """Peaks by phase; of many phases those with the highest, in their order."""
    steps = shown_steps([row.step for row in rank.memory])
    rows = {(row.step, row.phase): row for row in rank.memory}
    highest: dict[str, PhaseRow] = {}
    for row in rank.memory:
        if row.phase not in highest or row.peak > highest[row.phase].peak:
            highest[row.phase] = row
    kept = sorted(highest, key=lambda phase: -highest[phase].peak)[:MAX_PHASES]
    most = Counter[str]()
    for row in highest.values():
        most |= Counter(row.by_kind)  # the larger of both
    kinds = [kind for kind, _ in most.most_common(_room_for_kinds(console))]
    seconds = {each.phase: each.seconds for step in result.times[-1:] for each in step.phases}
    lines = []
    for phase in [phase for phase in highest if phase in kept]:
        peaks = [gib(at.peak) if (at := rows.get((step, phase))) else None for step in (0, *steps)]
        of_kinds = [gib(nbytes) if (nbytes := highest[phase].by_kind.get(kind)) else None for kind in kinds]
        lines.append((phase, *peaks, *of_kinds, format_number(seconds.get(phase))))
    names = ["before", *[f"step {step}" for step in steps], *kinds, "seconds (estimate)"]
    title = f"GiB of rank {rank.rank} at the peak of each phase"
    if left := len(highest) - len(kept):
        title += f" ({counted(left, 'lower phase')} on the page)"
    _print(console, title, lines, ("phase", *names), left=1)


def _room_for_kinds(console: Console) -> int:
    """Columns beside phase, steps and seconds."""
    return max(0, min(MAX_KINDS, (console.width - 70) // 17))


def _ranks(result: Result, console: Console) -> None:
    ranks = by_need(result)
    lines = []
    for rank in ranks[:MAX_RANKS]:
        free = gib(result.capacity - rank.need) if result.capacity else None
        sizes = (gib(rank.peak), gib(rank.need - rank.peak), gib(rank.need), free)
        lines.append((str(rank.rank), stages(rank), when(*rank.peak_at), *sizes))
    title = f"Tightest of {counted(len(ranks), 'rehearsed rank')}, of {result.world_size} in the job (GiB)"
    _print(console, title, lines, ("rank", "stages", "peak at", "tensors", "margin", "needs", "free"), left=3)


def _times(result: Result, console: Console) -> None:
    shown = shown_steps([step.step for step in result.times])
    lines = []
    for index, step in enumerate(result.times):
        if step.step not in shown:
            continue
        rollout = result.rollouts[index] if index < len(result.rollouts) else None
        engines = (None, None) if rollout is None else tuple(map(format_number, (rollout.slowest, rollout.fastest)))
        figures = (format_number(step.seconds), format_number(step.tokens_per_second), percent(step.utilisation))
        waits = (percent(step.bubble), percent(step.exposed), percent(step.recomputation))
        lines.append((str(step.step), *figures, *waits, *engines))
    names = (
        "step",
        "seconds",
        "tokens/s",
        "MFU",
        "bubble",
        "exposed comm.",
        "recomputation",
        "rollout, slowest s",
        "fastest s",
    )
    if lines:
        _print(console, f"Time, estimated by {result.hardware}", lines, names, left=1)
    else:
        console.print(Text(NO_TIME))


def _wire(rank: RankResult, console: Console) -> None:
    steps = shown_steps([row.step for row in rank.messages])
    if not steps:
        return
    rows = [row for row in rank.messages if row.step == steps[-1]]
    sums: Counter[str] = Counter()
    for row in rows:
        sums[way(row)] += row.nbytes
    lines = [
        (*map(str, key), format_number(count), size(nbytes))
        for key, (count, nbytes) in list(summed(rows).items())[:MAX_WIRE]
    ]
    ways = ", ".join(f"{size(nbytes)} {name}" for name, nbytes in sums.items())
    title = f"Largest messages of rank {rank.rank} in step {steps[-1]}; all: {ways}"
    _print(console, title, lines, ("phase", "operation", "group", "ranks", "way", "count", "bytes"), left=3)


def _print(console: Console, title: str, lines: Sequence[Sequence[object]], names: Sequence[str], *, left: int) -> None:
    """left: the columns that are words; the others stand to the right."""
    made = table(title, lines, names)
    for column in made.columns[left:]:
        column.justify = "right"
    made.columns[0].no_wrap = True
    console.print(made)
