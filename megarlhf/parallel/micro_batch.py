"""Input of one forward: a grid of tokens, the positions of sequences in it, and columns of numbers beside it.

The grid has either rows padded on the right, one sequence each, or a single row in which sequences stand end to end
(packed) and may share a prefix. Per-token values are stored at the token that they describe.

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

from megarlhf.columns import Ragged
from megarlhf.parallel.context import ContextShare, ranges
from megarlhf.parallel.packing.rows import ROOT, PackedRow, packed_row, path_to

FILLER_LENGTH = 32
"""Greatest length of the sequences that fill up a packed row."""


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class MicroBatchLayout:
    """Positions of sequences in a micro-batch's grid.

    Example: sequences 5 and 7 of 3 and 4 tokens share their first 2 tokens in a packed row of 8 columns. The row holds
    the prefix, the rest of 5, the rest of 7, and 3 columns of filler: `segments=(2, 1, 2)`, `parents=(ROOT, 0, 0)`,
    `last_segments=(1, 2)`, `starts=(2, 3)`."""

    sequences: tuple[int, ...]
    """Indices of the caller."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    starts: tuple[int, ...]
    """Position of each sequence's first token in the flattened grid. For a sequence with a shared prefix: its first
    token behind the prefix."""
    rows: int
    columns: int
    packed: bool
    segments: tuple[int, ...] = ()
    """Tokens of each segment, for a packed row with shared prefixes (`PackedRow`). Empty: each sequence is a
    segment."""
    parents: tuple[int, ...] = ()
    """For each segment the one that it continues, or `ROOT`."""
    last_segments: tuple[int, ...] = ()
    """For each sequence the segment that it ends with."""

    def packed_row(self, device: torch.device, cp_group: dist.ProcessGroup | None = None) -> PackedRow | None:
        """Borders of a packed row's sequences; None for padded rows. The rest of the row is divided into short filler
        sequences, whose attention costs next to nothing.

        Under context parallelism the padding behind a sequence belongs to the sequence, and none of its tokens sees it.
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
        return tuple(segment for segment, parent in enumerate(self.parents) if parent == ROOT)

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens without padding. A shared prefix counts once."""
        return sum(self.segments or self.lengths)

    @cached_property
    def tokens_R(self) -> Tensor:
        """Positions of all tokens in the flattened grid, sequence after sequence, int64 on the CPU. A shared token is
        listed for each of its sequences."""
        if not self.segments:
            return ranges(torch.tensor(self.starts, dtype=torch.int64), torch.tensor(self.lengths, dtype=torch.int64))
        paths = itertools.chain.from_iterable(path_to(last, self.parents) for last in self.last_segments)
        paths_V = torch.tensor(list(paths), dtype=torch.int64)
        segments_M = torch.tensor(self.segments, dtype=torch.int64)
        starts_M = segments_M.cumsum(0) - segments_M
        return ranges(starts_M[paths_V], segments_M[paths_V])

    @cached_property
    def predictors_S(self) -> Tensor | None:
        """For each column of a packed row the column that predicts it: the previous token of its sequence. int64 on the
        CPU; arbitrary for a sequence's first token. None: the column to the left."""
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
        """Position of each sequence's last token, int64 on the CPU."""
        return self.tokens_R[torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1]

    @property
    def sequences_K(self) -> Tensor:
        """`sequences`, int64 on the CPU."""
        return torch.tensor(self.sequences, dtype=torch.int64)

    def index_R(self, spans: TokenSpans) -> Tensor:
        """Positions of the values on `spans` in the flattened grid, sequence after sequence, int64 on the CPU."""
        lengths_K = torch.tensor(self.lengths, dtype=torch.int64)
        starts_K = lengths_K.cumsum(0) - lengths_K
        spans_K = spans.lengths.lengths_N[self.sequences_K]
        chosen_P = ranges(spans.lengths.cu_seqlens[self.sequences_K], spans_K)
        starts_P = starts_K.repeat_interleave(spans_K) + spans.first_P[chosen_P]
        return self.tokens_R[ranges(starts_P, spans.lengths.values_T[chosen_P])]

    def grid_BS(self, values_R: Tensor, spans: TokenSpans, fill: float = 0) -> Tensor:
        """A grid with these values on `spans` and `fill` elsewhere, on their device, in their dtype."""
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
        return self.lengths.sums_N

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
        """The batch itself, if a token precedes each span, or nothing would predict its first token."""
        unpredicted = (self.first_P < 1).nonzero().flatten()
        assert not len(unpredicted), (
            f"span {int(unpredicted[0])} begins its sequence (an empty prompt): nothing predicts its first token"
        )
        return self


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward of one data-parallel rank."""

    tokens_BS: Tensor
    """int64: rows padded on the right, or one packed row."""
    columns: Mapping[str, Tensor]
    """Inputs of the loss."""
    layout: MicroBatchLayout | None = None
    """Positions of the sequences. None: each row is one sequence, from its first column on."""
    share: ContextShare | None = None
    """Columns that this rank has computed; set by the forward, for users of hidden states. None: all."""

    @cached_property
    def predictors_S(self) -> Tensor | None:
        """`MicroBatchLayout.predictors_S` on the tokens' device."""
        predictors_S = None if self.layout is None else self.layout.predictors_S
        return None if predictors_S is None else predictors_S.to(self.tokens_BS.device)

    def before(self, grid_BS: Tensor) -> Tensor:
        """[B, S]: at each token the value of the token before it in its sequence, which predicts it. Gradients flow;
        arbitrary at a sequence's first token."""
        if self.predictors_S is None:
            return grid_BS.roll(1, dims=1)
        return grid_BS.index_select(1, self.predictors_S)


def scatter_to_micro_batch(layout: MicroBatchLayout, table: Ragged, spans: TokenSpans, fill: float = 0) -> Tensor:
    """[B, S]: each sequence's row of `table` on its span, `fill` elsewhere, on the table's device, in its dtype.

    `table` has a row for each of the caller's sequences, as long as its span.
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
    """[B, S]: each sequence's value on its whole span, 0 elsewhere. values_N is on the CPU."""
    chosen_K = layout.sequences_K
    return layout.grid_BS(values_N[chosen_K].repeat_interleave(spans.count_N[chosen_K]), spans).to(device)


def gather_from_micro_batch(layout: MicroBatchLayout, grid_BS: Tensor, spans: TokenSpans) -> dict[int, Tensor]:
    """Caller's index -> values on the sequence's span. Inverse of `scatter_to_micro_batch`."""
    values_R = grid_BS.flatten()[layout.index_R(spans).to(grid_BS.device)]
    counts = spans.count_N[list(layout.sequences)].tolist()
    return dict(zip(layout.sequences, values_R.split(counts), strict=True))


def prompts_computed(layouts_by_rank: Sequence[Sequence[MicroBatchLayout]]) -> tuple[int, int]:
    """(number of computed prompts, number of prompts saved since sequences share them)."""
    layouts = list(itertools.chain.from_iterable(layouts_by_rank))
    sequences = sum(len(layout.sequences) for layout in layouts)
    computed = sum(len(layout.segments and layout.roots) or len(layout.sequences) for layout in layouts)
    return computed, sequences - computed
