"""The element-wise work on logits, which every backend does in its own way.

Legend: T tokens, V vocabulary columns, R ranks of the tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarlhf.kernels.statistics import Merged, Statistics, VocabRange


@dataclass(frozen=True)
class LogprobOptions:
    """How logits and labels are to be read."""

    scale: float
    """1 / temperature; multiplies logits before everything."""
    ignore_index: int
    """The label of a token that gives 0 and has no gradient."""
    vocab: int
    """VocabRange of the whole vocabulary that are not padding."""
    entropy: bool
    """The entropy is asked for."""


class Tiles(Protocol):
    """One backend's passes over a tile of logits. `logits_TV` may have any row stride."""

    def update(
        self,
        stats: Statistics,
        logits_TV: Tensor,
        labels_T: Tensor,
        columns: VocabRange,
        options: LogprobOptions,
        *,
        fresh: bool,
    ) -> None:
        """Take the tile into the statistics of its rows; `fresh`: they hold nothing yet. Reads logits once."""
        ...

    def merge(self, stats_RT4: Tensor, labels_T: Tensor, options: LogprobOptions) -> Merged:
        """All ranks' statistics, in rank order."""
        ...

    def gradient(
        self,
        out_TV: Tensor,
        logits_TV: Tensor,
        labels_T: Tensor,
        columns: VocabRange,
        merged: Merged,
        grad_logprobs_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        options: LogprobOptions,
    ) -> None:
        """Write d loss / d logits of every column, padding included, into out_TV, which may be logits_TV.

        d logprob / dz = [z is the label's] - p and d entropy / dz = -p (log p + entropy), p the softmax.
        """
        ...
