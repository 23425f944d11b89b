"""The parts of a result that the console and the page show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from megarlhf.rehearsal.result import MessageRow, PhaseRow, RankResult, Result

HOST = "from host memory"
"""Messages of objects and of tensors of the CPU. They go over gloo, inside a node too."""


class _OfStep(Protocol):
    @property
    def step(self) -> int: ...


def tightest_first(result: Result) -> list[RankResult]:
    """The rehearsed ranks, those that need most memory first."""
    return sorted(result.ranks, key=lambda rank: (rank.rank != result.tightest, -rank.need, rank.rank))


def peak_row(rank: RankResult) -> PhaseRow:
    """The phase in which the rank holds most."""
    return next(row for row in rank.memory if (row.step, row.phase) == rank.peak_at)


def end_steps(rows: Iterable[_OfStep]) -> list[int]:
    """The first step and the last one, which represents all later ones. Step 0 is before the first one and left out."""
    steps = sorted({row.step for row in rows} - {0})
    return [steps[0], steps[-1]] if len(steps) > 1 else steps


def carrier(row: MessageRow) -> str:
    """The link that carries a message."""
    return HOST if row.host else "between nodes" if row.between_nodes else "inside a node"


def bytes_by_carrier(rows: Iterable[MessageRow]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for row in rows:
        sums[carrier(row)] += row.nbytes
    return sums


MessageKey = tuple[str, str, str, int, str]
"""Phase, operation, group, its ranks and the carrier."""


def sum_messages(rows: Iterable[MessageRow]) -> dict[MessageKey, tuple[int, int]]:
    """(count, bytes) of equal messages, the most bytes first."""
    sums: dict[MessageKey, tuple[int, int]] = {}
    for row in rows:
        key = (row.phase, row.operation, row.group, row.size, carrier(row))
        count, nbytes = sums.get(key, (0, 0))
        sums[key] = count + row.count, nbytes + row.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))
