"""The page's section about messages: collectives, groups, and the weights' way into the engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megarlhf.rehearsal.report.page_memory import rank_name, shown_ranks
from megarlhf.rehearsal.report.page_parts import folded, for_each_rank, number, panel, paragraph, table, text
from megarlhf.rehearsal.report.sentences import shown_steps, stages
from megarlhf.rehearsal.result import MessageRow, RankResult, Reshard, Result

SUM = (0, 0)
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """Four digits and a unit of powers of 1000."""
    power = 0
    while nbytes >= 1000 ** (power + 1) and power < len(UNITS) - 1:
        power += 1
    return f"{nbytes / 1000**power:.4g} {UNITS[power]}"


HOST = "from host memory"
"""Objects and tensors of the CPU, over gloo, inside a node too."""


def way(row: MessageRow) -> str:
    """What carries it."""
    return HOST if row.host else "between nodes" if row.between_nodes else "inside a node"


def summed(
    rows: Iterable[MessageRow], by: Sequence[str] = ("phase", "operation", "group", "size")
) -> dict[tuple[object, ...], tuple[int, int]]:
    """(count, bytes) by these fields and the way, the most bytes first."""
    sums: dict[tuple[object, ...], tuple[int, int]] = {}
    for row in rows:
        key = (*(getattr(row, name) for name in by), way(row))
        count, nbytes = sums.get(key, SUM)
        sums[key] = count + row.count, nbytes + row.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def wire_section(result: Result) -> str:
    said = (
        "What each rank says to others. A call counts with the whole that it is about: an all-reduce or a broadcast "
        "with the tensor, an all-gather with what is gathered from all, a reduce-scatter with what is scattered "
        "to all, an all-to-all with what this rank sends. A group counts as between nodes when its ranks stand in more "
        "than one. A rank calls what makes a group for others' groups too; groups made counts these calls. "
        "What is sent from host memory (objects, tensors of the CPU) goes over gloo and has a column of its own, "
        "inside a node too."
    )
    ranks = shown_ranks(result)
    parts = [f"<h2>The wire</h2>{paragraph(said)}", _totals(result)]
    parts.append(for_each_rank(ranks, lambda rank: rank_name(result, rank), _of_rank))
    parts.append(_reshard(result.reshard))
    return "\n".join(parts)


def _totals(result: Result) -> str:
    steps = shown_steps([row.step for rank in result.ranks for row in rank.messages])
    if not steps:
        return paragraph("No message in a step.")
    lines = []
    for rank in shown_ranks(result):
        sums: dict[str, int] = defaultdict(int)
        rows = [row for row in rank.messages if row.step == steps[-1]]
        for row in rows:
            sums[way(row)] += row.nbytes
        sizes = [size(sums[name]) for name in ("inside a node", "between nodes", HOST)]
        count = sum(row.count for row in rows)
        lines.append([rank.rank, stages(rank), count, *sizes, rank.groups_created, rank.memberships])
    columns = [number("rank"), text("stages"), number(f"messages in step {steps[-1]}"), number("inside a node")]
    columns += [number("between nodes"), number(HOST), number("groups made")]
    return panel(table([*columns, number("groups it is in")], lines))


def _of_rank(rank: RankResult) -> str:
    steps = shown_steps([row.step for row in rank.messages])
    by_step = {step: summed(row for row in rank.messages if row.step == step) for step in (0, *steps)}
    keys = {key: None for step in steps[::-1] for key in by_step[step]}
    lines = [[*key, *[cell for step in steps for cell in _count_and_size(by_step[step].get(key, SUM))]] for key in keys]
    kinds = [text("phase"), text("operation"), text("group"), number("ranks"), text("way")]
    columns = [*kinds, *[number(name) for _ in steps for name in ("count", "bytes")]]
    groups = [("", len(kinds)), *[(f"step {step}", 2) for step in steps]]
    parts = [f"<h4>Rank {rank.rank} by phase, the most bytes first</h4>", table(columns, lines, groups=groups)]
    if by_step[0]:
        before = [[*key, *_count_and_size(sums)] for key, sums in by_step[0].items()]
        inside = table([*kinds, number("count"), number("bytes")], before)
        parts.append(folded(f"Messages of rank {rank.rank} before the first step", inside))
    return panel("".join(parts))


def _count_and_size(sums: tuple[int, int]) -> tuple[object, object]:
    return (sums[0], size(sums[1])) if sums[0] else ("-", "-")


def _reshard(reshard: Reshard | None) -> str:
    head = "<h4>From trainer to engines</h4>"
    if reshard is None:
        return head + paragraph("No weights go from trainer to engines in this run, or their plan was not asked for.")
    rows = [
        ["received by a rank, least", size(reshard.received_min)],
        ["received by a rank, mean", size(reshard.received_mean)],
        ["received by a rank, most", size(reshard.received_max)],
        ["sent by a rank, most", size(reshard.sent_max)],
        ["into all nodes together", size(reshard.between_nodes)],
    ]
    said = "Once, by the resharder's plan for every rank of the job and not for the rehearsed ones only."
    return head + paragraph(said) + panel(table([text(""), number("bytes")], rows))
