"""The packed functions as `algo/gae.py` and `algo/whitening.py` specify them: loops, in fp32 (fp64 for fp64).

Legend: T tokens of all sequences end to end, N sequences, 3: sum, sum of squares, count.
"""

from __future__ import annotations

from torch import Tensor

from megarlhf.algo import gae as specification
from megarlhf.algo import whitening
from megarlhf.algo.whitening import group_moments
from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs
from megarlhf.kernels.statistics import working_dtype

__all__ = ["gae", "group_moments", "moments", "whiten"]


def gae(inputs: GAEInputs, sequences: CuSeqlens) -> tuple[Tensor, Tensor]:
    """`algo.gae.gae` of `algo.gae.kl_shaped_rewards`."""
    dtype, cu_seqlens = inputs.dtype, sequences.cu_seqlens
    logprobs_T, scores_N, values_T = (x.to(dtype) for x in (inputs.logprobs_T, inputs.scores_N, inputs.values_T))
    ref_T = None if inputs.ref_logprobs_T is None else inputs.ref_logprobs_T.to(dtype)
    token_rewards_T = None if inputs.token_rewards_T is None else inputs.token_rewards_T.to(dtype)
    rewards_T = specification.kl_shaped_rewards(
        logprobs_T,
        ref_T,
        scores_N,
        cu_seqlens,
        kl_coef=inputs.kl_coef,
        kl_kind=inputs.kl_kind,
        token_rewards_T=token_rewards_T,
    )
    return specification.gae(rewards_T, values_T, cu_seqlens, gamma=inputs.gamma, lam=inputs.lam)


def moments(x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens) -> Tensor:
    """See `algo.whitening.moments`."""
    return whitening.moments(x_T, mask_T, sequences.cu_seqlens)


def whiten(
    x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens, mean_N: Tensor, scale_N: Tensor, shift_mean: bool
) -> Tensor:
    """See `algo.whitening.whiten`."""
    x_T = x_T.to(working_dtype(x_T))
    return whitening.whiten(x_T, mask_T, sequences.cu_seqlens, mean_N, scale_N, shift_mean=shift_mean)
