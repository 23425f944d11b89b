"""Statistics of a softmax over a sharded vocabulary: four numbers per token and rank, and their merge.

Legend: T tokens, R ranks of the tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def empty_table(logits_TV: Tensor) -> Tensor:
    """Uninitialised memory for statistics of these rows over columns z, which are added block by block.

    [T, 4] fp32 (fp64 for fp64 logits). For each token
      0  m = max z; the lowest finite number without any column, or with padding only, so that differences stay finite
      1  sum e^(z - m)
      2  sum e^(z - m) (z - m); 0 if the entropy is not needed
      3  z of the label's column; 0 where another rank has it
    """
    return torch.empty(logits_TV.size(0), 4, dtype=working_dtype(logits_TV), device=logits_TV.device)


def gather_tables(table_T4: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather every rank's table, [R, T, 4]: the only collective of a forward."""
    if group is None or group.size() == 1:
        return table_T4[None]
    flat = table_T4.new_empty(group.size() * table_T4.size(0), 4)
    dist.all_gather_into_tensor(flat, table_T4, group=group)
    return flat.view(group.size(), *table_T4.shape)


class Merged(NamedTuple):
    """Statistics over the whole vocabulary, the same bits on every rank. The tensors share no memory."""

    max_T: Tensor
    sum_T: Tensor
    entropy_T: Tensor
    """0 for ignored tokens."""
    logprobs_T: Tensor
    """0 for ignored tokens."""


def merge(tables_RT4: Tensor, kept_T: Tensor, entropy: bool) -> Merged:
    """Merge the ranks' tables in rank order, so that the arithmetic is the same on every rank."""
    max_RT, sum_RT, moment_RT, label_RT = tables_RT4.unbind(-1)
    max_T = max_RT.amax(0)
    shift_RT = (max_RT - max_T).clamp(min=LOG_ZERO)
    scale_RT = shift_RT.exp()
    # A rank's moment is about its own max; about the common one it gains sum_r (m_r - m).
    sum_T = (sum_RT * scale_RT).sum(0)
    moment_T = ((moment_RT + sum_RT * shift_RT) * scale_RT).sum(0)
    log_sum_T = sum_T.log()
    entropy_T = torch.where(kept_T, log_sum_T - moment_T / sum_T, 0.0) if entropy else torch.zeros_like(max_T)
    # Not lse - z, which has three digits left under a common offset of 1e4.
    logprobs_T = torch.where(kept_T, (label_RT.sum(0) - max_T) - log_sum_T, 0.0)
    return Merged(max_T, sum_T, entropy_T, logprobs_T)


LOG_ZERO = -1e3
"""Lower bound of differences of maxima and of log p. e^-1000 is 0 in fp32 and fp64, and the product of -1000 with this
0 is 0, unlike the product with -inf, or of 1e35 with a large sum."""


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of computation and results: fp64 if any tensor is fp64, otherwise fp32."""
    any_fp64 = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if any_fp64 else torch.float32


@dataclass(frozen=True)
class VocabRange:
    """The part of the vocabulary in a tensor's columns."""

    first: int
    """Index of the first column in the global vocabulary."""
    count: int
    """Columns without padding, which is last."""

    def cut(self, start: int, stop: int) -> VocabRange:
        """The range of the tensor's columns [start, stop)."""
        return VocabRange(self.first + start, min(max(self.count - start, 0), stop - start))


def local_vocab_range(width: int, true_vocab: int | None, group: dist.ProcessGroup | None) -> tuple[VocabRange, int]:
    """This rank's columns, and the size of the vocabulary without padding.

    Raises: ValueError for a `true_vocab` greater than the columns of all ranks, or below 1.
    """
    tp, rank = (1, 0) if group is None else (group.size(), group.rank())
    vocab = width * tp if true_vocab is None else true_vocab
    if not 0 < vocab <= width * tp:
        raise ValueError(
            f"true_vocab = {vocab} is not in [1, {width * tp}], the {width} columns of each of {tp} ranks; "
            "give the tokenizer's vocabulary size, without padding"
        )
    return VocabRange(0, vocab).cut(rank * width, (rank + 1) * width), vocab
