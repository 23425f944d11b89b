"""Advantages: from rewards, values and groups to one number per response token.

Axes: B responses (rows), T response positions, N samples. `mask_BT` is bool and marks each row's response
tokens: a contiguous run that starts at column 0. What stands on padding (even NaN) is never read, and every
`_BT` result is zero there. Give fp32 or fp64; results have the dtype of the input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def _zero_padding(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, x_BT, torch.zeros_like(x_BT))


@torch.no_grad()
def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), and the returns for the critic.

    Shapes:  rewards_BT, values_BT, mask_BT [B, T] -> advantages_BT, returns_BT [B, T]
    Maths:   d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  return_t = A_t + V_t;
             V and A past the last response token are zero (the response is over)
    Note:    advantages are not whitened, see `whiten`; no gradient flows through
    """
    rewards_BT = _zero_padding(rewards_BT, mask_BT)
    values_BT = _zero_padding(values_BT, mask_BT)
    next_values_BT = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)
    deltas_BT = rewards_BT + gamma * next_values_BT - values_BT
    advantages_BT = torch.zeros_like(deltas_BT)
    running_B = deltas_BT.new_zeros(deltas_BT.shape[0])
    for t in reversed(range(deltas_BT.shape[1])):
        running_B = deltas_BT[:, t] + gamma * lam * running_B
        advantages_BT[:, t] = running_B
    return advantages_BT, advantages_BT + values_BT


def shaped_rewards(scores_N: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, kl_coef: float) -> Tensor:
    """Reward per token: -kl_coef * kl_t everywhere, plus the response's score on its last token.

    Shapes:  scores_N [B], kl_BT and mask_BT [B, T] -> [B, T]
    Source:  Ziegler et al. 2019, eq. 2, spread over tokens; the KL here is `kl_estimate(..., 'k1')`
    Note:    a row without a response token has nowhere to put its score and stays zero
    """
    rewards_BT = -kl_coef * _zero_padding(kl_BT, mask_BT)
    lengths_B = mask_BT.sum(dim=1)
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    is_last_BT = positions_T[None, :] == lengths_B[:, None] - 1
    return rewards_BT + torch.where(is_last_BT, scores_N[:, None], torch.zeros_like(rewards_BT))


class _Groups(NamedTuple):
    index_N: Tensor
    """Each sample's group as 0..G-1."""
    size_N: Tensor
    """How many samples its group has, as fp64."""
    centred_N: Tensor
    """Its reward less its group's mean, as fp64."""


def _centre_groups(rewards_N: Tensor, groups_N: Tensor) -> _Groups:
    """fp64, so that a group of equal rewards is centred to zero and not to rounding noise over eps."""
    rewards_N = rewards_N.double()
    _, index_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    sum_G = torch.zeros(len(size_G), dtype=torch.float64, device=rewards_N.device)
    sum_G = sum_G.index_add(0, index_N, rewards_N)
    return _Groups(index_N, size_G[index_N].double(), rewards_N - (sum_G / size_G)[index_N])


def group_relative(rewards_N: Tensor, groups_N: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO: how much better a response is than its siblings, (r - mean) / (std + eps) within its group.

    Shapes:  rewards_N [N], groups_N [N] integers, equal for responses to one prompt, in any order -> [N]
    Maths:   std is the unbiased one (divided by the group's size - 1), as in code that calls `torch.std`;
             `scale_by_std=False` leaves it out (Dr. GRPO, Liu et al. 2025)
    Source:  DeepSeekMath (Shao et al. 2024), section 4.1.2, which does not say which std
    Note:    a group of one has no sibling: zero
    """
    groups = _centre_groups(rewards_N, groups_N)
    if not scale_by_std:
        return groups.centred_N.to(rewards_N.dtype)
    squares_G = torch.zeros_like(groups.centred_N).index_add(0, groups.index_N, groups.centred_N.square())
    std_N = (squares_G[groups.index_N] / (groups.size_N - 1).clamp(min=1)).sqrt()
    return (groups.centred_N / (std_N + eps)).to(rewards_N.dtype)


def leave_one_out(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """RLOO: r_i minus the mean reward of the other responses to the same prompt.

    Shapes:  rewards_N [N], groups_N [N] integers -> [N]
    Maths:   r_i - mean_{j != i} r_j = k / (k - 1) * (r_i - mean r) for a group of k
    Source:  Kool et al. 2019; Ahmadian et al. 2024, eq. 8
    Note:    a group of one has no baseline: zero
    """
    groups = _centre_groups(rewards_N, groups_N)
    factor_N = groups.size_N / (groups.size_N - 1).clamp(min=1)
    return (groups.centred_N * factor_N).to(rewards_N.dtype)


def broadcast_to_tokens(adv_N: Tensor, mask_BT: Tensor) -> Tensor:
    """One advantage per response to each of its tokens: [B], [B, T] -> [B, T], zero on padding."""
    return _zero_padding(adv_N[:, None].expand(mask_BT.shape), mask_BT)


class Moments(NamedTuple):
    """Sums that add up over ranks: all-reduce each with SUM and the result is the whole batch's."""

    total: Tensor
    """Sum of the masked elements, fp64, 0-d."""
    squares: Tensor
    """Sum of their squares, fp64, 0-d."""
    num_elements: Tensor
    """How many there are, fp64, 0-d."""

    def mean(self) -> Tensor:
        """Mean; zero of nothing is zero."""
        return self.total / self.num_elements.clamp(min=1)

    def variance(self) -> Tensor:
        """Biased variance (divided by the count)."""
        return (self.squares / self.num_elements.clamp(min=1) - self.mean().square()).clamp(min=0)


def masked_moments(x_BT: Tensor, mask_BT: Tensor) -> Moments:
    """Sum, sum of squares and count of the masked elements of any shape, in fp64 against cancellation."""
    x_BT = _zero_padding(x_BT, mask_BT).double()
    return Moments(x_BT.sum(), x_BT.square().sum(), mask_BT.sum().double())


def whiten(
    x_BT: Tensor,
    mask_BT: Tensor,
    *,
    eps: float = 1e-8,
    shift_mean: bool = True,
    moments: Moments | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over all masked elements, with the biased variance.

    Shapes:  x_BT, mask_BT [B, T] -> [B, T]
    shift_mean: False adds the mean back, so that only the scale changes
    moments: those of the whole batch, where x_BT is one rank's part of it; without them x_BT is the batch
    """
    moments = masked_moments(x_BT, mask_BT) if moments is None else moments
    mean = moments.mean()
    whitened_BT = (x_BT.double() - mean) * torch.rsqrt(moments.variance() + eps)
    if not shift_mean:
        whitened_BT = whitened_BT + mean
    return _zero_padding(whitened_BT, mask_BT).to(x_BT.dtype)
