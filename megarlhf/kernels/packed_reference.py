"""The specification of the packed functions: plain loops over sequences and tokens, in fp32 (fp64 for fp64).

Legend: T tokens of all sequences end to end, N sequences, 3: sum, sum of squares, count.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megarlhf.kernels.packed_problem import Borders, Shaping, wide


def gae(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None,
    values_T: Tensor,
    scores_N: Tensor,
    borders: Borders,
    how: Shaping,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation of KL-shaped rewards, and the returns for the critic.

    Shapes:  logprobs_T, ref_logprobs_T, values_T [T], scores_N [N] -> advantages_T, returns_T [T]
    Maths:   r_t = -kl_coef kl_t, plus the sequence's score at its last token
             d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  return_t = A_t + V_t;
             V and A past the last token are zero (the response is over)
             with log r = ref_logprob - logprob, kl is -log r (k1), (log r)^2 / 2 (k2) or (r - 1) - log r (k3)
    Source:  Ziegler et al. 2019, eq. 2 (the reward); Schulman et al. 2016, eq. 16 (GAE); Schulman, "Approximating KL
             divergence" (2020)
    """
    dtype = wide(logprobs_T, ref_logprobs_T, values_T, scores_N)
    rewards_T = torch.zeros(borders.num_tokens, dtype=dtype, device=values_T.device)
    if ref_logprobs_T is not None:
        rewards_T -= how.kl_coef * _kl(ref_logprobs_T.to(dtype) - logprobs_T.to(dtype), how.kl_kind)
    values_T = values_T.to(dtype)
    advantages_T = torch.zeros_like(rewards_T)
    for n, (start, end) in enumerate(_sequences(borders)):
        next_value = running = rewards_T.new_zeros(())
        for t in reversed(range(start, end)):
            reward = rewards_T[t] + scores_N[n].to(dtype) if t == end - 1 else rewards_T[t]
            running = reward + how.gamma * next_value - values_T[t] + how.gamma * how.lam * running
            advantages_T[t], next_value = running, values_T[t]
    return advantages_T, advantages_T + values_T


def discounted_returns(rewards_T: Tensor, borders: Borders, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, zero past the last token. Source: Sutton and Barto 2018, eq. 3.9"""
    returns_T = torch.zeros_like(rewards_T, dtype=wide(rewards_T))
    for start, end in _sequences(borders):
        running = returns_T.new_zeros(())
        for t in reversed(range(start, end)):
            running = returns_T[t] = rewards_T[t].to(returns_T.dtype) + gamma * running
    return returns_T


def moments(x_T: Tensor, mask_T: Tensor | None, borders: Borders) -> Tensor:
    """Sum x, sum x^2 and the count of each sequence's tokens inside the mask, one after the other, in fp64."""
    moments_N3 = torch.zeros(borders.num_sequences, 3, dtype=torch.float64, device=x_T.device)
    for n, (start, end) in enumerate(_sequences(borders)):
        for t in range(start, end):
            if mask_T is None or bool(mask_T[t]):
                x = x_T[t].double()
                moments_N3[n] += torch.stack([x, x * x, torch.ones_like(x)])
    return moments_N3


def add_groups(moments_N3: Tensor, groups_N: Tensor) -> Tensor:
    """A group's moments are the sum of its sequences', in their order."""
    total: dict[int, Tensor] = {}
    for group, moments_3 in zip(groups_N.tolist(), moments_N3, strict=True):
        total[group] = total[group] + moments_3 if group in total else moments_3
    return torch.stack([total[group] for group in groups_N.tolist()]) if total else moments_N3


def standardise(
    x_T: Tensor, mask_T: Tensor | None, borders: Borders, mean_N: Tensor, scale_N: Tensor, shift_mean: bool
) -> Tensor:
    """(x - mean) * scale, plus the mean unless `shift_mean`; in fp64, and zero outside the mask."""
    found_T = torch.zeros_like(x_T, dtype=wide(x_T))
    for n, (start, end) in enumerate(_sequences(borders)):
        for t in range(start, end):
            if mask_T is None or bool(mask_T[t]):
                found_T[t] = (x_T[t].double() - mean_N[n]) * scale_N[n] + (0.0 if shift_mean else mean_N[n])
    return found_T


def _kl(log_ratio_T: Tensor, kind: str) -> Tensor:
    """As algo/kl.py, which stands on the same floor of the house."""
    if kind == "k1":
        return -log_ratio_T
    if kind == "k2":
        return log_ratio_T.square() / 2
    return torch.expm1(log_ratio_T) - log_ratio_T


def _sequences(borders: Borders) -> list[tuple[int, int]]:
    return list(itertools.pairwise(borders.cu_seqlens.tolist()))
