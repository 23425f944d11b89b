"""Planning of micro-batches: which sequences go together, and their positions in the grid (`micro_batch.py`).

Every rank knows every sequence's length, so all ranks agree on shapes without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarlhf.config import MicroBatchConfig
from megarlhf.layout import column_multiple, split_evenly
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.micro_batch import MicroBatchLayout, round_up
from megarlhf.parallel.packing.partition import ForwardCost, pack
from megarlhf.parallel.packing.tree_layouts import SequenceGroup, segments_of
from megarlhf.parallel.packing.tree_partition import PrefixGroup, pack_trees

FILLER = -1
"""Placeholder for a sample in a row that is left over. Nothing is computed from it."""


def split_padded(samples: Sequence[int], dp: int, micro_batch_samples: int) -> list[list[list[int]]]:
    """Padded micro-batches of each data-parallel rank. A rank gets a contiguous share of `samples`, in order.

    All ranks get the same number of full micro-batches; a shorter share is filled up with `FILLER`.

    Example: samples 0..4, dp 2, 2 samples each -> [[[0, 1], [2, FILLER]], [[3, 4], [FILLER, FILLER]]]
    """
    shares = [[samples[n] for n in share] for share in split_evenly(len(samples), dp)]
    size = round_up(max(map(len, shares)), micro_batch_samples)
    filled = [share + [FILLER] * (size - len(share)) for share in shares]
    return [
        [share[start : start + micro_batch_samples] for start in range(0, size, micro_batch_samples)]
        for share in filled
    ]


def padded_length(longest: int, mesh: Mesh) -> int:
    """Columns of the grid for rows of up to `longest` tokens: see `layout.column_multiple`."""
    return round_up(longest, column_multiple(mesh.layout.tp, mesh.layout.cp))


def owners_of_outputs(mesh: Mesh, layouts_by_rank: Sequence[Sequence[MicroBatchLayout]]) -> list[list[int]]:
    """For each rank of the run the sequences whose outputs it provides, given the layouts of each data-parallel
    rank."""
    owners: list[list[int]] = [[] for _ in range(mesh.runtime.world_size)]
    for dp, layouts in enumerate(layouts_by_rank):
        owners[mesh.owner_of_outputs(dp)] = [n for layout in layouts for n in layout.sequences]
    return owners


@dataclass(frozen=True)
class Batching:
    """Planner of one role's micro-batches."""

    mesh: Mesh
    cost: ForwardCost
    """Cost by which packed micro-batches are balanced."""
    micro: MicroBatchConfig
    share: bool = False
    """Whether the common prefix of a group is computed once for all its sequences in a micro-batch, where possible."""

    @property
    def shares(self) -> bool:
        """True if prefixes are shared: `share` is on, and micro-batches are packed rows of whole sequences."""
        return self.share and self.micro.max_tokens_per_micro_batch is not None and self.mesh.layout.cp == 1

    def layouts(self, groups: Sequence[Sequence[int]], lengths_N: Tensor, **shared: Any) -> list[MicroBatchLayout]:
        """This data-parallel rank's micro-batches. All ranks get the same number. See `layouts_by_rank`."""
        return self.own(self.layouts_by_rank(groups, lengths_N, **shared))

    def own(self, by_rank: Sequence[list[MicroBatchLayout]]) -> list[MicroBatchLayout]:
        """This data-parallel rank's share of micro-batches that are about to be computed. Every rank has as many.
        Rehearsals count them here, as work of all ranks."""
        return self.mesh.own(by_rank)

    def layouts_by_rank(
        self,
        groups: Sequence[Sequence[int]],
        lengths_N: Tensor,
        *,
        shared: Sequence[int] = (),
        divisible: bool = False,
    ) -> list[list[MicroBatchLayout]]:
        """The micro-batches of every data-parallel rank, in their order.

        groups: indices of sequences that stay together in one micro-batch, in this order
        lengths_N: [N] int64, lengths of all sequences of the step. Padded rows are as long as the longest of them.
        shared: for each group the length of its sequences' common prefix; empty: none
        divisible: groups need not stay together where prefixes are shared
        Raises: ValueError where a group, or a sequence of a divisible one, exceeds `max_tokens_per_micro_batch`
        """
        lengths, budget = lengths_N.tolist(), self.micro.max_tokens_per_micro_batch
        if budget is None:
            assert self.micro.micro_batch_samples is not None
            return self._padded(groups, lengths, self.micro.micro_batch_samples)
        if shared and self.shares:
            return self._trees(groups, lengths, budget, shared, divisible)
        return self._packed(groups, lengths, budget)

    def _padded(self, groups: Sequence[Sequence[int]], lengths: list[int], size: int) -> list[list[MicroBatchLayout]]:
        columns = padded_length(max(lengths), self.mesh)

        def layout(padded: Sequence[int]) -> MicroBatchLayout:
            real = [n for n in padded if n != FILLER]
            sequences = tuple(itertools.chain.from_iterable(groups[n] for n in real))
            return MicroBatchLayout(
                sequences=sequences,
                lengths=tuple(lengths[n] for n in sequences),
                starts=tuple(range(0, len(sequences) * columns, columns)),
                # All groups have the same size: a filler takes as many rows as a group.
                rows=size * len(groups[0]),
                columns=columns,
                packed=False,
            )

        by_rank = split_padded(range(len(groups)), self.mesh.layout.dp, size)
        return [[layout(padded) for padded in micro_batches] for micro_batches in by_rank]

    def _packed(self, groups: Sequence[Sequence[int]], lengths: list[int], budget: int) -> list[list[MicroBatchLayout]]:
        multiple = 1 if self.mesh.layout.cp == 1 else 2 * self.mesh.layout.cp
        spaces = [round_up(length, multiple) for length in lengths]
        micro_batches_by_rank = pack(
            [[spaces[n] for n in group] for group in groups],
            num_ranks=self.mesh.layout.dp,
            max_tokens=round_up(budget, multiple),
            cost=self.cost,
        )

        def layout(chosen_groups: Sequence[int]) -> MicroBatchLayout:
            sequences = tuple(itertools.chain.from_iterable(groups[n] for n in chosen_groups))
            return self._row(sequences, lengths, [spaces[n] for n in sequences])

        return [[layout(chosen) for chosen in micro_batches] for micro_batches in micro_batches_by_rank]

    def _row(self, sequences: tuple[int, ...], lengths: Sequence[int], spaces: Sequence[int]) -> MicroBatchLayout:
        """A packed row of sequences that share nothing. `spaces`: columns of each sequence."""
        return MicroBatchLayout(
            sequences=sequences,
            lengths=tuple(lengths[n] for n in sequences),
            starts=tuple(itertools.accumulate(spaces, initial=0))[:-1],
            rows=1,
            columns=padded_length(max(sum(spaces), 1), self.mesh),
            packed=True,
        )

    def _trees(
        self,
        groups: Sequence[Sequence[int]],
        lengths: list[int],
        budget: int,
        shared: Sequence[int],
        divisible: bool,
    ) -> list[list[MicroBatchLayout]]:
        prefixes = tuple(
            PrefixGroup(common, tuple(lengths[n] for n in group), divisible)
            for group, common in zip(groups, shared, strict=True)
        )
        packed = pack_trees(prefixes, num_ranks=self.mesh.layout.dp, max_tokens=budget, cost=self.cost)

        def layout(chosen: Sequence[tuple[int, tuple[int, ...]]]) -> MicroBatchLayout:
            entries = []
            for n, members in chosen:
                sequences = tuple(groups[n][member] for member in members)
                entries.append(SequenceGroup(sequences, tuple(lengths[m] for m in sequences), shared[n]))
            sequences = tuple(itertools.chain.from_iterable(entry.sequences for entry in entries))
            if not any(entry.is_tree for entry in entries):
                return self._row(sequences, lengths, [lengths[n] for n in sequences])
            segments = segments_of(entries)
            return MicroBatchLayout(
                sequences=sequences,
                lengths=tuple(lengths[n] for n in sequences),
                starts=segments.starts,
                rows=1,
                columns=padded_length(sum(segments.lengths), self.mesh),
                packed=True,
                segments=segments.lengths,
                parents=segments.parents,
                last_segments=segments.last,
            )

        return [[layout(chosen) for chosen in micro_batches] for micro_batches in packed]
