"""What the packed functions work on, and what each backend brings.

Legend: T tokens of all sequences end to end, N sequences, 3: sum, sum of squares, count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megarlhf.algo.kl import KLKind


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
class GAEOptions:
    """How a reward is made of log-probs and scores, and discounted."""

    gamma: float
    lam: float
    kl_coef: float
    kl_kind: KLKind


class PackedKernels(Protocol):
    """A backend's module. All arguments were looked at by packed.py, and lie on one device."""

    def gae(
        self,
        logprobs_T: Tensor,
        ref_logprobs_T: Tensor | None,
        values_T: Tensor,
        scores_N: Tensor,
        sequences: CuSeqlens,
        options: GAEOptions,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, [T] each. Without a reference there is no KL in the reward."""
        ...

    def moments(self, x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens) -> Tensor:
        """[N, 3] fp64 of each sequence's tokens, of those in the mask."""
        ...

    def group_moments(self, moments_N3: Tensor, groups_N: Tensor) -> Tensor:
        """[N, 3]: at each sequence the sum over all sequences of its group."""
        ...

    def whiten(
        self,
        x_T: Tensor,
        mask_T: Tensor | None,
        sequences: CuSeqlens,
        mean_N: Tensor,
        scale_N: Tensor,
        shift_mean: bool,
    ) -> Tensor:
        """[T]: (x - mean) * scale of its sequence, plus the mean unless `shift_mean`; 0 outside the mask."""
        ...
