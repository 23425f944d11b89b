"""How much work each data-parallel rank has, seen from any of them: every rank packs the micro-batches of all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarlhf.parallel.batching import Batching
from megarlhf.parallel.micro_batch import MicroBatchLayout
from megarlhf.parallel.packing.partition import ForwardCost


@dataclass(frozen=True)
class RankLoad:
    """What one data-parallel rank has to do in one phase, over all steps."""

    cost: float
    """By what micro-batches are balanced with (`parallel/packing/partition.py`)."""
    tokens: int
    """That are computed, without what fills rows up: what sequences share counts once."""
    longest: int
    """Positions of its largest micro-batch."""
    micro_batches: int

    def __add__(self, other: RankLoad) -> RankLoad:
        return RankLoad(
            self.cost + other.cost,
            self.tokens + other.tokens,
            max(self.longest, other.longest),
            self.micro_batches + other.micro_batches,
        )


Shares = Mapping[str, Sequence[RankLoad]]
"""By phase, of each data-parallel rank of the phase's role."""


@contextlib.contextmanager
def seen_batches(
    at: Callable[[], tuple[int, str]], shares: dict[str, list[RankLoad]], tokens: Counter[tuple[int, str]]
) -> Iterator[None]:
    """Inside, `shares` and `tokens` collect what is computed in the step and phase that `at` tells: the work of each
    rank over all steps, and the tokens of all ranks by step, of whole sequences, as a run's `tokens_per_second` counts
    them.
    """
    original = Batching.own

    def own(self: Batching, by_rank: Sequence[list[MicroBatchLayout]]) -> list[MicroBatchLayout]:
        (step, name), found = at(), [_share(self, layouts) for layouts in by_rank]
        tokens[step, name] += sum(sum(layout.lengths) for layouts in by_rank for layout in layouts)
        before = shares.get(name)
        shares[name] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]
        return original(self, by_rank)

    Batching.own = own  # type: ignore[method-assign]
    try:
        yield
    finally:
        Batching.own = original  # type: ignore[method-assign]


def _share(batching: Batching, layouts: Sequence[MicroBatchLayout]) -> RankLoad:
    sizes = [layout.rows * layout.columns for layout in layouts]
    cost = sum(_cost(batching.cost, layout) for layout in layouts)
    return RankLoad(cost, sum(layout.num_tokens for layout in layouts), max(sizes, default=0), len(layouts))


def _cost(cost: ForwardCost, layout: MicroBatchLayout) -> float:
    if layout.segments:
        return cost.of_segments(layout.segments, layout.parents)
    return sum(map(cost.of, layout.lengths))
