"""Advantages and returns of every token: the specification, in plain loops over sequences and tokens.

`kernels/packed.py` computes the same fast and is tested against this. Sequences stand end to end: sequence n is tokens
cu_seqlens[n] up to cu_seqlens[n + 1]. Give fp32 or fp64; results have the dtype of the input.

Legend: T tokens of all sequences end to end, N sequences.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megarlhf.algo.kl import KLKind, kl_estimate


def kl_shaped_rewards(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None,
    scores_N: Tensor,
    cu_seqlens: Tensor,
    *,
    kl_coef: float,
    kl_kind: KLKind = "k1",
    token_rewards_T: Tensor | None = None,
) -> Tensor:
    """The reward of each token: the KL to the reference as a cost, and the sequence's score at its last token.

    Shapes:  logprobs_T, ref_logprobs_T, token_rewards_T [T], scores_N [N], cu_seqlens [N + 1] integers -> [T]
    Maths:   r_t = -kl_coef kl_t + token_rewards_t, plus the score where t is the last token of its sequence; kl is
             `kl_estimate`
    Source:  Ziegler et al. 2019, eq. 2; Ouyang et al. 2022, eq. 2
    Note:    without reference log-probs there is no KL; a sequence of length 0 has nowhere to put its score
    """
    rewards_T = torch.zeros_like(logprobs_T)
    if ref_logprobs_T is not None:
        rewards_T -= kl_coef * kl_estimate(logprobs_T, ref_logprobs_T, kl_kind)
    if token_rewards_T is not None:
        rewards_T += token_rewards_T
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if start < end:
            rewards_T[end - 1] += scores_N[n]
    return rewards_T


def gae(rewards_T: Tensor, values_T: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and the returns for the critic.

    Shapes:  rewards_T, values_T [T], cu_seqlens [N + 1] integers -> advantages_T, returns_T [T]
    Maths:   d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  return_t = A_t + V_t;
             V and A past the last token are zero (the response is over)
    Source:  Schulman et al. 2016, eq. 16
    """
    advantages_T = torch.zeros_like(rewards_T)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        next_value = advantage = rewards_T.new_zeros(())
        for t in reversed(range(start, end)):
            advantage = rewards_T[t] + gamma * next_value - values_T[t] + gamma * lam * advantage
            advantages_T[t], next_value = advantage, values_T[t]
    return advantages_T, advantages_T + values_T


def returns_to_go(rewards_T: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token to the end of its sequence: REINFORCE's return.

    Shapes:  rewards_T [T], cu_seqlens [N + 1] integers -> [T]
    Maths:   G_t = r_t + gamma G_{t+1}: `gae` of values 0 with lam 1
    Source:  Williams 1992; Sutton and Barto, section 13.3
    """
    return gae(rewards_T, torch.zeros_like(rewards_T), cu_seqlens, gamma=gamma, lam=1.0)[0]
