"""What the packed functions work on.

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
    """Where sequences begin and end."""

    cu_seqlens: Tensor
    """[N + 1] int64, contiguous, on the tokens' device: sequence n is tokens cu[n] up to cu[n + 1]."""
    num_tokens: int
    max_seqlen: int
    """Tokens of the longest sequence; where only the device knows, all of them. Asking it would mean waiting."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def repeat_per_token(self, values_N: Tensor) -> Tensor:
        """A sequence's value at each of its tokens, [T]."""
        return values_N.repeat_interleave(self.cu_seqlens.diff(), output_size=self.num_tokens)


@dataclass(frozen=True)
class GAEInputs:
    """What a reward is made of, and how it is discounted: see `packed.packed_gae`, which has looked at all of it."""

    logprobs_T: Tensor
    ref_logprobs_T: Tensor | None
    """None: no KL in the reward."""
    values_T: Tensor
    scores_N: Tensor
    gamma: float
    lam: float
    kl_coef: float
    kl_kind: KLKind
    token_rewards_T: Tensor | None = None
    """Added to each token's reward; then there is no KL beside it."""

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return working_dtype(self.logprobs_T, self.ref_logprobs_T, self.values_T, self.scores_N, self.token_rewards_T)
