"""Interface of a backend for the element-wise work on logits.

Legend: T tokens, V vocabulary columns, R ranks of the tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarlhf.kernels.statistics import Merged, VocabRange


@dataclass(frozen=True)
class LogprobOptions:
    """Options of the log-probs."""

    temperature: float
    """Divisor of the logits."""
    ignore_index: int
    """Label of a token that gives 0 and has no gradient."""
    vocab: int
    """Columns of the whole vocabulary, without padding."""
    entropy: bool
    """Compute the entropy."""

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return 1.0 / self.temperature


@dataclass(frozen=True)
class OutputGradients:
    """Inputs of the backward: statistics of the softmax, and derivatives of the loss by log-probs and entropy."""

    merged: Merged
    labels_T: Tensor
    grad_logprobs_T: Tensor | None
    grad_entropy_T: Tensor | None

    def rows(self, rows: slice) -> OutputGradients:
        """Inputs of the backward for some tokens, as views."""
        grads = [None if grad_T is None else grad_T[rows] for grad_T in (self.grad_logprobs_T, self.grad_entropy_T)]
        return OutputGradients(Merged(*(column_T[rows] for column_T in self.merged)), self.labels_T[rows], *grads)


class Tiles(Protocol):
    """One backend's passes over a tile of logits. `logits_TV` may have any row stride."""

    options: LogprobOptions

    def update(
        self, table_T4: Tensor, logits_TV: Tensor, labels_T: Tensor, columns: VocabRange, *, fresh: bool
    ) -> None:
        """Add the tile to the statistics of its rows. `fresh`: the table is uninitialised. Reads logits once."""
        ...

    def merge(self, tables_RT4: Tensor, labels_T: Tensor) -> Merged:
        """Merge all ranks' statistics, in rank order."""
        ...

    def gradient(self, out_TV: Tensor, logits_TV: Tensor, columns: VocabRange, outputs: OutputGradients) -> None:
        """Write d loss / d logits of every column, padding included, into out_TV, which may be logits_TV.

        d logprob / dz = [z is the label's] - p and d entropy / dz = -p (log p + entropy), p the softmax.
        """
        ...
