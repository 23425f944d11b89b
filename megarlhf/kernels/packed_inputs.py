"""Inputs of the packed functions.

Legend: T tokens of all sequences end to end, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarlhf.algo.kl import KLKind
from megarlhf.kernels.statistics import working_dtype


@dataclass(frozen=True)
class CuSeqlens:
    """Borders of sequences."""

    cu_seqlens: Tensor
    """[N + 1] int64, contiguous, on the tokens' device: sequence n has tokens cu[n] to cu[n + 1] - 1."""
    num_tokens: int
    max_seqlen: int
    """Tokens of the longest sequence, or all tokens where only the device knows, since reading it would wait."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def repeat_per_token(self, values_N: Tensor) -> Tensor:
        """[N] -> [T]: each sequence's value at all of its tokens."""
        return values_N.repeat_interleave(self.cu_seqlens.diff(), output_size=self.num_tokens)


@dataclass(frozen=True)
class GAEInputs:
    """Checked arguments of `packed.packed_gae`."""

    logprobs_T: Tensor
    ref_logprobs_T: Tensor | None
    """Log-probs of the reference. None: no KL in the reward."""
    values_T: Tensor
    scores_N: Tensor
    gamma: float
    lam: float
    kl_coef: float
    kl_kind: KLKind
    token_rewards_T: Tensor | None = None
    """Added to each token's reward; then there is no KL."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return working_dtype(self.logprobs_T, self.ref_logprobs_T, self.values_T, self.scores_N, self.token_rewards_T)
