"""Work of each data-parallel rank. Any rank can tell it, since every rank packs the micro-batches of all."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

from megarlhf.parallel.batching import Batching
from megarlhf.parallel.micro_batch import MicroBatchLayout
from megarlhf.parallel.packing.partition import ForwardCost


@dataclass(frozen=True)
class RankLoad:
    """Work of one data-parallel rank in one phase, over all steps."""

    cost: float
    """Cost by which micro-batches are balanced (`parallel/packing/partition.py`)."""
    tokens: int
    """Computed tokens, without padding. Tokens that sequences share count once."""
    longest: int
    """Positions of the largest micro-batch."""
    micro_batches: int

    def __add__(self, other: RankLoad) -> RankLoad:
        return RankLoad(
            self.cost + other.cost,
            self.tokens + other.tokens,
            max(self.longest, other.longest),
            self.micro_batches + other.micro_batches,
        )


Loads = Mapping[str, Sequence[RankLoad]]
"""Loads by phase, one for each data-parallel rank of the phase's role."""


@contextlib.contextmanager
def recorded_batches(
    where: Callable[[], tuple[int, str]], loads: dict[str, list[RankLoad]], tokens: Counter[tuple[int, str]]
) -> Iterator[None]:
    """Scope in which `loads` and `tokens` collect the work that is computed.

    where:  tells the current step and phase.
    loads:  of each phase, the work of each rank over all steps.
    tokens: by step and phase, the tokens of whole sequences on all ranks, as a run's `tokens_per_second` counts them.
    """
    original = Batching.own

    def own(self: Batching, by_rank: Sequence[list[MicroBatchLayout]]) -> list[MicroBatchLayout]:
        step, phase = where()
        current = [_load(self, layouts) for layouts in by_rank]
        tokens[step, phase] += sum(sum(layout.lengths) for layouts in by_rank for layout in layouts)
        before = loads.get(phase)
        loads[phase] = current if before is None else [a + b for a, b in zip(before, current, strict=True)]
        return original(self, by_rank)

    with patch.object(Batching, "own", own):
        yield


def _load(batching: Batching, layouts: Sequence[MicroBatchLayout]) -> RankLoad:
    sizes = [layout.rows * layout.columns for layout in layouts]
    cost = sum(_cost(batching.cost, layout) for layout in layouts)
    return RankLoad(cost, sum(layout.num_tokens for layout in layouts), max(sizes, default=0), len(layouts))


def _cost(cost: ForwardCost, layout: MicroBatchLayout) -> float:
    if layout.segments:
        return cost.of_segments(layout.segments, layout.parents)
    return sum(map(cost.of, layout.lengths))
