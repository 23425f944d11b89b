"""From samples to micro-batches: which sequences go together, where each stands, and columns scattered there.

A micro-batch is a grid of tokens: rows padded on the right, one sequence each, or a single row in which sequences
stand end to end (packed). Every rank knows every sequence's length, so all agree on shapes without a message.

Legend: B rows, S columns of the grid, N sequences known to the caller, K sequences of a micro-batch, R values placed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.config import MicroBatchConfig
from megarlhf.experience import Ragged
from megarlhf.layout import column_multiple, split_evenly
from megarlhf.parallel.context import ranges
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.packed_rows import ROOT, PackedRow, packed_row, way_to
from megarlhf.parallel.packing import Cost, pack
from megarlhf.parallel.tree_layouts import Entry, segments_of
from megarlhf.parallel.tree_packing import Packed, PrefixGroup, pack_trees

FILLER = -1
"""Stands for a sample where a rank has a row too many; nothing is computed from it."""

FILLER_LENGTH = 32
"""Tokens of a sequence, at most, with which a packed row is filled up."""


def split_padded(samples: Sequence[int], dp: int, micro_batch_samples: int) -> list[list[list[int]]]:
    """Padded micro-batches of `samples` by data-parallel rank: a contiguous share for each, in order.

    All ranks get the same number of full micro-batches; a share that falls short is filled with `FILLER`.
    """
    shares = [[samples[n] for n in share] for share in split_evenly(len(samples), dp)]
    size = micro_batch_samples * -(-max(map(len, shares)) // micro_batch_samples)
    filled = [share + [FILLER] * (size - len(share)) for share in shares]
    return [
        [share[start : start + micro_batch_samples] for start in range(0, size, micro_batch_samples)]
        for share in filled
    ]


def padded_length(longest: int, mesh: Mesh) -> int:
    """Columns of the grid for rows of up to `longest` tokens: see `layout.column_multiple`."""
    return round_up(longest, column_multiple(mesh.layout.tp, mesh.layout.cp))


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class MicroBatchLayout:
    """Where the sequences of a micro-batch stand."""

    sequences: tuple[int, ...]
    """By the caller's numbers."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    starts: tuple[int, ...]
    """Where each one's first token stands in the grid read row by row; of one that continues a segment, the first token
    behind it."""
    rows: int
    columns: int
    packed: bool
    segments: tuple[int, ...] = ()
    """Tokens of the segments of a packed row in which sequences have some in common (`PackedRow`). Empty: each sequence
    is one."""
    parents: tuple[int, ...] = ()
    """By segment the one that it continues, `ROOT` where it begins a sequence."""
    last_segments: tuple[int, ...] = ()
    """By sequence the segment that it ends with."""

    def packed_row(self, device: torch.device, cp_group: dist.ProcessGroup | None = None) -> PackedRow | None:
        """Where the sequences of a packed row begin, None for padded rows. What is left of the row is cut into short
        sequences of its own, over which attention costs next to nothing.

        Under context parallelism a sequence ends where the next begins: the padding after it is its own, which no
        token of it sees.
        """
        if not self.packed:
            return None
        multiple = 1 if cp_group is None else 2 * cp_group.size()
        filler = round_up(FILLER_LENGTH, multiple)
        lengths = [round_up(length, multiple) for length in self.segments or self.lengths]
        fillers, remainder = divmod(self.columns - sum(lengths), filler)
        filling = [filler] * fillers + [remainder] * (remainder > 0)
        parents = (*self.parents, *[ROOT] * len(filling)) if self.parents else ()
        return packed_row([*lengths, *filling], device, cp_group, parents)

    @property
    def roots(self) -> tuple[int, ...]:
        """Segments that begin sequences."""
        return tuple(number for number, parent in enumerate(self.parents) if parent == ROOT)

    @property
    def num_tokens(self) -> int:
        """That are computed, without what fills rows up: what sequences share counts once."""
        return sum(self.segments or self.lengths)

    @cached_property
    def tokens_R(self) -> Tensor:
        """Where the tokens of the sequences stand in the grid read row by row, sequence after sequence, int64 on the
        CPU. What several share is there for each of them."""
        if not self.segments:
            return ranges(torch.tensor(self.starts, dtype=torch.int64), torch.tensor(self.lengths, dtype=torch.int64))
        ways = itertools.chain.from_iterable(way_to(last, self.parents) for last in self.last_segments)
        ways_V = torch.tensor(list(ways), dtype=torch.int64)
        segments_M = torch.tensor(self.segments, dtype=torch.int64)
        starts_M = segments_M.cumsum(0) - segments_M
        return ranges(starts_M[ways_V], segments_M[ways_V])

    @cached_property
    def predictors_S(self) -> Tensor | None:
        """By column of a packed row the one before it in its sequence, which predicts it, int64 on the CPU; of a
        sequence's first token that is no matter. None: each column's is the one to its left."""
        if not self.segments:
            return None
        segments_M, parents_M = (torch.tensor(x, dtype=torch.int64) for x in (self.segments, self.parents))
        ends_M = segments_M.cumsum(0)
        continued_M = parents_M != ROOT
        before_S = torch.arange(-1, self.columns - 1).clamp_(min=0)
        before_S[(ends_M - segments_M)[continued_M]] = ends_M[parents_M[continued_M]] - 1
        return before_S

    @property
    def ends_K(self) -> Tensor:
        """Where each sequence's last token stands, int64 on the CPU."""
        return self.tokens_R[torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1]

    @property
    def sequences_K(self) -> Tensor:
        """`sequences`, int64 on the CPU."""
        return torch.tensor(self.sequences, dtype=torch.int64)

    def index_R(self, spans: TokenSpans) -> Tensor:
        """Where the values of `spans` stand in the grid read row by row, sequence after sequence, int64, on the CPU."""
        lengths_K = torch.tensor(self.lengths, dtype=torch.int64)
        starts_K = lengths_K.cumsum(0) - lengths_K + spans.first_N[self.sequences_K]
        return self.tokens_R[ranges(starts_K, spans.count_N[self.sequences_K])]

    def grid_BS(self, values_R: Tensor, spans: TokenSpans, fill: float = 0) -> Tensor:
        """The values on `spans`, sequence after sequence, and `fill` elsewhere; on their device, in their dtype."""
        grid_X = values_R.new_full((self.rows * self.columns,), fill)
        grid_X[self.index_R(spans).to(values_R.device)] = values_R
        return grid_X.view(self.rows, self.columns)


@dataclass(frozen=True)
class TokenSpans:
    """A stretch of every sequence: `count` values from position `first` on."""

    first_N: Tensor
    """int64, on the CPU."""
    count_N: Tensor
    """int64, on the CPU."""

    @staticmethod
    def whole(lengths_N: Tensor) -> TokenSpans:
        """All tokens of each sequence."""
        return TokenSpans(torch.zeros_like(lengths_N), lengths_N)

    @staticmethod
    def last(lengths_N: Tensor) -> TokenSpans:
        """The last token of each sequence."""
        return TokenSpans(lengths_N - 1, torch.ones_like(lengths_N))

    @staticmethod
    def responses(prompt_lengths_N: Tensor, response_lengths_N: Tensor) -> TokenSpans:
        """The tokens behind the prompt. A prompt has at least one token, or nothing would predict the first of them."""
        empty = (prompt_lengths_N < 1).nonzero().flatten()
        assert not len(empty), (
            f"sequence {int(empty[0])} has an empty prompt: nothing predicts its first response token"
        )
        return TokenSpans(prompt_lengths_N, response_lengths_N)


def scatter_to_micro_batch(layout: MicroBatchLayout, table: Ragged, spans: TokenSpans, fill: float = 0) -> Tensor:
    """[B, S]: each sequence's row of `table` on its span, `fill` elsewhere; on the table's device, in its dtype.

    Rows of `table` are by the caller's numbers, each as long as its span.
    """
    chosen_K = layout.sequences_K
    assert torch.equal(table.lengths_N[chosen_K], spans.count_N[chosen_K]), "rows and spans differ in length"
    starts_N = table.lengths_N.cumsum(0) - table.lengths_N
    source_R = ranges(starts_N[chosen_K], spans.count_N[chosen_K]).to(table.values_T.device)
    return layout.grid_BS(table.values_T[source_R], spans, fill)


def micro_batch_mask(layout: MicroBatchLayout, spans: TokenSpans, device: torch.device) -> Tensor:
    """[B, S] bool: True on the spans."""
    return repeat_on_micro_batch(layout, torch.ones_like(spans.count_N, dtype=torch.bool), spans, device)


def repeat_on_micro_batch(
    layout: MicroBatchLayout, values_N: Tensor, spans: TokenSpans, device: torch.device
) -> Tensor:
    """[B, S]: each sequence's number on every position of its span, 0 elsewhere. values_N is on the CPU."""
    chosen_K = layout.sequences_K
    return layout.grid_BS(values_N[chosen_K].repeat_interleave(spans.count_N[chosen_K]), spans).to(device)


def gather_from_micro_batch(layout: MicroBatchLayout, grid_BS: Tensor, spans: TokenSpans) -> dict[int, Tensor]:
    """The values on each sequence's span, by the caller's numbers: the way back from `scatter_to_micro_batch`."""
    values_R = grid_BS.flatten()[layout.index_R(spans).to(grid_BS.device)]
    counts = spans.count_N[list(layout.sequences)].tolist()
    return dict(zip(layout.sequences, values_R.split(counts), strict=True))


def owners_of_outputs(mesh: Mesh, layouts_by_rank: Sequence[Sequence[MicroBatchLayout]]) -> list[list[int]]:
    """By rank of the run, the sequences whose outputs it hands out, from the layouts of each data-parallel rank."""
    owners: list[list[int]] = [[] for _ in range(mesh.runtime.world_size)]
    for dp, layouts in enumerate(layouts_by_rank):
        owners[mesh.owner_of_outputs(dp)] = [n for layout in layouts for n in layout.sequences]
    return owners


@dataclass(frozen=True)
class Batching:
    """How one role's sequences become micro-batches."""

    mesh: Mesh
    cost: Cost
    """What packed micro-batches are balanced by."""
    micro: MicroBatchConfig
    share: bool = False
    """What sequences of a group have in common is computed once where they meet in a micro-batch, if these are packed
    rows of whole sequences."""

    @property
    def shares(self) -> bool:
        """Whether it is."""
        return self.share and self.micro.max_tokens_per_micro_batch is not None and self.mesh.layout.cp == 1

    def layouts(self, groups: Sequence[Sequence[int]], lengths_N: Tensor, **shared: Any) -> list[MicroBatchLayout]:
        """This data-parallel rank's micro-batches; every rank gets as many. See `layouts_by_rank`."""
        return self.mesh.own(self.layouts_by_rank(groups, lengths_N, **shared))

    def layouts_by_rank(
        self,
        groups: Sequence[Sequence[int]],
        lengths_N: Tensor,
        *,
        shared: Sequence[int] = (),
        divisible: bool = False,
    ) -> list[list[MicroBatchLayout]]:
        """The micro-batches of every data-parallel rank, in their order, which are about to be computed.

        `groups` are numbers of sequences that stay together, in one micro-batch, in this order. `lengths_N` are the
        lengths of all the sequences of the step, [N] int64: padded rows are as long as the longest of them. `shared`:
        by group, how many tokens its sequences begin with in common; empty: none. Where they are shared, groups that
        are `divisible` need not stay together.

        Raises: ValueError where a group, or a sequence of a divisible one, does not fit into
        `max_tokens_per_micro_batch`.
        """
        return self.planned_by_rank(groups, lengths_N, shared=shared, divisible=divisible)

    def planned_by_rank(
        self,
        groups: Sequence[Sequence[int]],
        lengths_N: Tensor,
        *,
        shared: Sequence[int] = (),
        divisible: bool = False,
    ) -> list[list[MicroBatchLayout]]:
        """The same, where somebody only asks what will be computed. Rehearsals count the others as work."""
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
            real = [n for n in padded if n != FILLER]  # fillers come last
            sequences = tuple(itertools.chain.from_iterable(groups[n] for n in real))
            return MicroBatchLayout(
                sequences=sequences,
                lengths=tuple(lengths[n] for n in sequences),
                starts=tuple(range(0, len(sequences) * columns, columns)),
                # Groups of one micro-batch are alike: a filler takes as many rows as they do.
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
        """A packed row of sequences of their own."""
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
        packed = packed_trees(prefixes, num_ranks=self.mesh.layout.dp, max_tokens=budget, cost=self.cost)

        def layout(chosen: Sequence[tuple[int, tuple[int, ...]]]) -> MicroBatchLayout:
            entries = []
            for n, members in chosen:
                own = tuple(groups[n][member] for member in members)
                entries.append(Entry(own, tuple(lengths[each] for each in own), shared[n]))
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


@lru_cache(maxsize=64)
def packed_trees(groups: tuple[PrefixGroup, ...], **how: Any) -> Packed:
    """`pack_trees`, once for all that ask: a step's micro-batches are asked for by whoever computes on them, and by
    whoever wants to know who has them."""
    return pack_trees(groups, **how)


def prompts_computed(layouts_by_rank: Sequence[Sequence[MicroBatchLayout]]) -> tuple[int, int]:
    """How many beginnings of sequences are computed, and how many of them are spared since sequences share them."""
    layouts = list(itertools.chain.from_iterable(layouts_by_rank))
    sequences = sum(len(layout.sequences) for layout in layouts)
    computed = sum(len(layout.segments and layout.roots) or len(layout.sequences) for layout in layouts)
    return computed, sequences - computed
