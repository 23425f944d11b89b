"""Advantages of whole responses: from rewards and groups to one number per sample.

Advantages of tokens are in gae.py. Axes: N samples, G groups. Give fp32 or fp64; results have the dtype of
the input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Groups(NamedTuple):
    index_N: Tensor
    """Each sample's group as 0..G-1."""
    size_N: Tensor
    """How many samples its group has, as fp64."""
    centred_N: Tensor
    """Its reward less its group's mean, as fp64."""
    size_G: Tensor


def _centre_groups(rewards_N: Tensor, groups_N: Tensor) -> _Groups:
    """fp64, so that a group of equal rewards is centred to zero and not to rounding noise over eps."""
    rewards_N = rewards_N.double()
    _, index_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    mean_G = _group_sums(rewards_N, index_N, size_G) / size_G
    return _Groups(index_N, size_G[index_N].double(), rewards_N - mean_G[index_N], size_G)


def _group_sums(values_N: Tensor, index_N: Tensor, size_G: Tensor) -> Tensor:
    """[G]: each group's sum in the order of its samples. Not index_add: on a GPU its order changes from run to run."""
    order_N = index_N.argsort(stable=True)
    # `unsafe` leaves out a check of lengths that waits for the device and does not take an empty tensor.
    return torch.segment_reduce(values_N[order_N], "sum", lengths=size_G, axis=0, unsafe=True)


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
    squares_G = _group_sums(groups.centred_N.square(), groups.index_N, groups.size_G)
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
