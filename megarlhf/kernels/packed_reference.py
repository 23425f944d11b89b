"""Reference backend of the packed functions: the loops of `algo/gae.py` and `algo/whitening.py`, in fp32 (fp64 for
fp64).

Legend: T tokens of all sequences end to end, N sequences, 3: sum, sum of squares, count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarlhf.algo import gae as specification
from megarlhf.algo import whitening
from megarlhf.algo.whitening import group_moments
from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs
from megarlhf.kernels.statistics import working_dtype

__all__ = ["gae", "group_moments", "moments", "whiten"]


def gae(inputs: GAEInputs, sequences: CuSeqlens) -> tuple[Tensor, Tensor]:
    """See `algo.gae.kl_shaped_rewards` and `algo.gae.gae`."""

    def cast(x: Tensor | None) -> Any:
        return None if x is None else x.to(inputs.dtype)

    rewards_T = specification.kl_shaped_rewards(
        cast(inputs.logprobs_T),
        cast(inputs.ref_logprobs_T),
        cast(inputs.scores_N),
        sequences.cu_seqlens,
        kl_coef=inputs.kl_coef,
        kl_kind=inputs.kl_kind,
        token_rewards_T=cast(inputs.token_rewards_T),
    )
    values_T = cast(inputs.values_T)
    return specification.gae(rewards_T, values_T, sequences.cu_seqlens, gamma=inputs.gamma, lam=inputs.lam)


def moments(x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens) -> Tensor:
    """See `algo.whitening.moments`."""
    return whitening.moments(x_T, mask_T, sequences.cu_seqlens)


def whiten(
    x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens, mean_N: Tensor, scale_N: Tensor, shift_mean: bool
) -> Tensor:
    """See `algo.whitening.whiten`."""
    x_T = x_T.to(working_dtype(x_T))
    return whitening.whiten(x_T, mask_T, sequences.cu_seqlens, mean_N, scale_N, shift_mean=shift_mean)
