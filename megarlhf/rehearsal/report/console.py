"""A rehearsal's result on the terminal, in about 60 lines. The page has the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from megarlhf.observe.terminal.progress import format_number, table
from megarlhf.rehearsal.report.selection import bytes_by_carrier, end_steps, peak_row, sum_messages, tightest_first
from megarlhf.rehearsal.report.sentences import (
    ESTIMATE,
    NO_TIME,
    NOT_MEASURED,
    gib,
    kinds,
    moment,
    percent,
    quantity,
    resume_point,
    size,
    stages,
    verdict,
    waits_for_cache,
)
from megarlhf.rehearsal.result import PhaseRow, RankResult, Result

MAX_PHASES, MAX_RANKS, MAX_MESSAGES, MAX_SENTENCES, MAX_KINDS = 14, 4, 5, 5, 4


def print_result(result: Result, console: Console) -> None:
    """Verdict, memory of the tightest rank, ranks, time, messages, refusals, faults and notes."""
    first, *others = verdict(result)
    rank = result.tightest_rank
    console.print(Text(first, style="bold green" if result.runs else "bold red"))
    tightest = f"Its tightest moment, in GiB: {kinds(peak_row(rank).by_kind, 6)}."
    for sentence in [*others, tightest, f"{NOT_MEASURED} {ESTIMATE}"]:
        console.print(Text(sentence))
    _print_list(console, "The run would not start", result.refusals, "red")
    _print_list(console, "Ranks do not fit together", result.faults, "red")
    _print_memory(result, rank, console)
    for sentence in resume_point(result):
        console.print(Text(sentence))
    _print_ranks(result, console)
    _print_times(result, console)
    for sentence in waits_for_cache(result):
        console.print(Text(sentence))
    _print_messages(rank, console)
    _print_list(console, "What stood in for what", result.notes, "")
    if result.assumptions:
        reads = sum(row.count for row in result.assumptions)
        console.print(Text(f"{quantity(reads, 'number')} had to be assumed; the page says where and why."))


def _print_list(console: Console, title: str, sentences: Sequence[str], style: str) -> None:
    if not sentences:
        return
    console.print(Text(f"{title}:", style=f"bold {style}".strip()))
    for sentence in sentences[:MAX_SENTENCES]:
        console.print(Text(f"- {sentence}", style=style))
    if others := sentences[MAX_SENTENCES:]:
        console.print(Text(f"- and {quantity(len(others), 'other')}, on the page"))


def _print_memory(result: Result, rank: RankResult, console: Console) -> None:
    steps = [0, *end_steps(rank.memory)]
    rows = {(row.step, row.phase): row for row in rank.memory}
    highest: dict[str, PhaseRow] = {}
    for row in rank.memory:
        if row.phase not in highest or row.peak > highest[row.phase].peak:
            highest[row.phase] = row
    shown = sorted(highest, key=lambda phase: -highest[phase].peak)[:MAX_PHASES]
    largest = Counter[str]()
    for row in highest.values():
        largest |= Counter(row.by_kind)  # the larger of both
    room = max(0, min(MAX_KINDS, (console.width - 70) // 17))
    columns = [kind for kind, _ in largest.most_common(room)]
    seconds = {phase.phase: phase.seconds for step in result.times[-1:] for phase in step.phases}
    lines = []
    for phase, row in highest.items():
        if phase in shown:
            peaks = [gib(rows[step, phase].peak) if (step, phase) in rows else None for step in steps]
            parts = [gib(row.by_kind[kind]) if row.by_kind.get(kind) else None for kind in columns]
            lines.append((phase, *peaks, *parts, format_number(seconds.get(phase))))
    names = ["phase", "before", *[f"step {step}" for step in steps[1:]], *columns, "seconds (estimate)"]
    title = f"GiB of rank {rank.rank} at the peak of each phase"
    if lower := len(highest) - len(shown):
        title += f" ({quantity(lower, 'lower phase')} on the page)"
    _print_table(console, title, lines, names, text_columns=1)


def _print_ranks(result: Result, console: Console) -> None:
    ranks = tightest_first(result)
    lines = []
    for rank in ranks[:MAX_RANKS]:
        free = gib(result.capacity - rank.need) if result.capacity else None
        sizes = (gib(rank.peak), gib(rank.need - rank.peak), gib(rank.need), free)
        lines.append((str(rank.rank), stages(rank), moment(*rank.peak_at), *sizes))
    title = f"Tightest of {quantity(len(ranks), 'rehearsed rank')}, of {result.world_size} in the job (GiB)"
    names = ("rank", "stages", "peak at", "tensors", "margin", "needs", "free")
    _print_table(console, title, lines, names, text_columns=3)


def _print_times(result: Result, console: Console) -> None:
    if not result.times:
        console.print(Text(NO_TIME))
        return
    lines = []
    for index, step in enumerate(result.times):
        if step.step in end_steps(result.times):
            rollout = result.rollouts[index] if index < len(result.rollouts) else None
            engines = (
                (None, None) if rollout is None else (format_number(rollout.slowest), format_number(rollout.fastest))
            )
            shares = map(percent, (step.utilisation, step.bubble, step.exposed, step.recomputation))
            totals = (format_number(step.seconds), format_number(step.tokens_per_second))
            lines.append((str(step.step), *totals, *shares, *engines))
    names = ["step", "seconds", "tokens/s", "MFU", "bubble", "exposed comm.", "recomputation"]
    names += ["rollout, slowest s", "fastest s"]
    _print_table(console, f"Time, estimated by {result.hardware}", lines, names, text_columns=1)


def _print_messages(rank: RankResult, console: Console) -> None:
    steps = end_steps(rank.messages)
    if not steps:
        return
    rows = [row for row in rank.messages if row.step == steps[-1]]
    lines = [
        (*map(str, key), format_number(count), size(nbytes))
        for key, (count, nbytes) in list(sum_messages(rows).items())[:MAX_MESSAGES]
    ]
    totals = ", ".join(f"{size(nbytes)} {name}" for name, nbytes in bytes_by_carrier(rows).items())
    title = f"Largest messages of rank {rank.rank} in step {steps[-1]}; all: {totals}"
    names = ("phase", "operation", "group", "ranks", "way", "count", "bytes")
    _print_table(console, title, lines, names, text_columns=3)


def _print_table(
    console: Console, title: str, lines: Sequence[Sequence[object]], names: Sequence[str], *, text_columns: int
) -> None:
    """The first `text_columns` columns are text; the others are aligned to the right."""
    made = table(title, lines, names)
    for column in made.columns[text_columns:]:
        column.justify = "right"
    made.columns[0].no_wrap = True
    console.print(made)
