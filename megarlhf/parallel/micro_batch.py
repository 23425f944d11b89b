"""What one forward takes: a grid of tokens, where the sequences stand in it, and the columns of numbers beside it.

The grid has rows padded on the right, one sequence each, or a single row in which sequences stand end to end (packed)
and may share their beginnings. Numbers of a token stand at the token.

Legend: B rows, S columns of the grid, N sequences known to the caller, K sequences of a micro-batch, R values placed; M
segments, P spans, V segments on the ways to all sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.experience import Ragged
from megarlhf.parallel.context import ContextShare, ranges
from megarlhf.parallel.packing.rows import ROOT, PackedRow, packed_row, way_to

FILLER_LENGTH = 32
"""Tokens of a sequence, at most, with which a packed row is filled up."""


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
        starts_K = lengths_K.cumsum(0) - lengths_K
        spans_K = spans.lengths.lengths_N[self.sequences_K]
        chosen_P = ranges(spans.lengths.cu_seqlens[self.sequences_K], spans_K)
        starts_P = starts_K.repeat_interleave(spans_K) + spans.first_P[chosen_P]
        return self.tokens_R[ranges(starts_P, spans.lengths.values_T[chosen_P])]

    def grid_BS(self, values_R: Tensor, spans: TokenSpans, fill: float = 0) -> Tensor:
        """The values on `spans`, sequence after sequence, and `fill` elsewhere; on their device, in their dtype."""
        grid_X = values_R.new_full((self.rows * self.columns,), fill)
        grid_X[self.index_R(spans).to(values_R.device)] = values_R
        return grid_X.view(self.rows, self.columns)


@dataclass(frozen=True)
class TokenSpans:
    """Some tokens of every sequence, as spans: `lengths` tokens from position `first` of the sequence on.

    Example: tokens 2, 3 and 6 of the first sequence and token 1 of the second are spans of 2 and 1 tokens, and of one:
    first_P = [2, 6, 1], lengths = [[2, 1], [1]].
    """

    first_P: Tensor
    """Position of each span's first token in its sequence, sequence after sequence: int64, on the CPU."""
    lengths: Ragged
    """Tokens of each span, by sequence: int64, on the CPU."""

    @cached_property
    def count_N(self) -> Tensor:
        """Tokens of each sequence that are in its spans, int64, on the CPU."""
        if bool((self.lengths.lengths_N == 1).all()):
            return self.lengths.values_T
        return torch.stack([row.sum() for row in self.lengths.rows()])

    @staticmethod
    def single(first_N: Tensor, count_N: Tensor) -> TokenSpans:
        """One span of each sequence: `count` tokens from position `first` on."""
        return TokenSpans(first_N, Ragged(count_N, torch.ones_like(count_N)))

    @staticmethod
    def whole(lengths_N: Tensor) -> TokenSpans:
        """All tokens of each sequence."""
        return TokenSpans.single(torch.zeros_like(lengths_N), lengths_N)

    @staticmethod
    def last(lengths_N: Tensor) -> TokenSpans:
        """The last token of each sequence."""
        return TokenSpans.single(lengths_N - 1, torch.ones_like(lengths_N))

    @staticmethod
    def responses(prompt_lengths_N: Tensor, response_lengths_N: Tensor) -> TokenSpans:
        """The tokens behind the prompt."""
        return TokenSpans.single(prompt_lengths_N, response_lengths_N).require_predicted()

    def require_predicted(self) -> TokenSpans:
        """Itself, if a token stands before each span, or nothing would predict its first token."""
        unpredicted = (self.first_P < 1).nonzero().flatten()
        assert not len(unpredicted), (
            f"span {int(unpredicted[0])} begins its sequence (an empty prompt): nothing predicts its first token"
        )
        return self


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of one data-parallel rank takes."""

    tokens_BS: Tensor
    """int64: rows padded on the right, or one packed row."""
    columns: Mapping[str, Tensor]
    """Whatever the loss needs."""
    layout: MicroBatchLayout | None = None
    """Where the sequences stand; None: each row is one, from its first column on."""
    share: ContextShare | None = None
    """Which columns this rank has computed, for what goes on with hidden states: set by the forward. None: all."""

    @cached_property
    def predictors_S(self) -> Tensor | None:
        """See `MicroBatchLayout.predictors_S`, on the tokens' device."""
        predictors_S = None if self.layout is None else self.layout.predictors_S
        return None if predictors_S is None else predictors_S.to(self.tokens_BS.device)

    def before(self, grid_BS: Tensor) -> Tensor:
        """[B, S]: at each token what stands where it is predicted, at the token before it in its sequence. Gradients
        flow; what stands at a sequence's first token is no matter."""
        if self.predictors_S is None:
            return grid_BS.roll(1, dims=1)
        return grid_BS.index_select(1, self.predictors_S)


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


def prompts_computed(layouts_by_rank: Sequence[Sequence[MicroBatchLayout]]) -> tuple[int, int]:
    """How many beginnings of sequences are computed, and how many of them are spared since sequences share them."""
    layouts = list(itertools.chain.from_iterable(layouts_by_rank))
    sequences = sum(len(layout.sequences) for layout in layouts)
    computed = sum(len(layout.segments and layout.roots) or len(layout.sequences) for layout in layouts)
    return computed, sequences - computed
