"""Advantages of whole responses: from rewards and groups to one number per sample.

Advantages of tokens are in gae.py. Axes: N samples, G groups. Give fp32 or fp64; results have the dtype of
the input, and fp32 for whole numbers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

GroupOfOne = Literal["zero", "reward"]
"""Advantage of a response that is alone in its group, so that nothing can be compared: 0, or its reward."""


class _Groups(NamedTuple):
    index_N: Tensor
    """Each sample's group as 0..G-1."""
    size_N: Tensor
    """Number of samples in the group, as fp64."""
    centred_N: Tensor
    """Reward less the group's mean, as fp64."""
    size_G: Tensor


def _centre_groups(rewards_N: Tensor, groups_N: Tensor) -> _Groups:
    """A group of equal rewards is centred to zero exactly, and not to rounding noise over eps."""
    if rewards_N.ndim != 1 or rewards_N.shape != groups_N.shape:
        raise ValueError(
            f"rewards of shape {list(rewards_N.shape)} and groups of shape {list(groups_N.shape)}; give one number of "
            "each for a sample"
        )
    rewards_N = rewards_N.double()
    _, index_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    mean_G = _over_groups("sum", rewards_N, index_N, size_G) / size_G
    equal_G = _over_groups("max", rewards_N, index_N, size_G) == _over_groups("min", rewards_N, index_N, size_G)
    centred_N = torch.where(equal_G[index_N], 0.0, rewards_N - mean_G[index_N])
    return _Groups(index_N, size_G[index_N].double(), centred_N, size_G)


def _over_groups(reduction: Literal["sum", "max", "min"], values_N: Tensor, index_N: Tensor, size_G: Tensor) -> Tensor:
    """[G]: each group's samples in their order. Not index_add: on a GPU its order changes from run to run."""
    order_N = index_N.argsort(stable=True)
    # `unsafe` leaves out a check of lengths that waits for the device and does not take an empty tensor.
    return torch.segment_reduce(values_N[order_N], reduction, lengths=size_G, axis=0, unsafe=True)


def _with_single(advantages_N: Tensor, rewards_N: Tensor, groups: _Groups, group_of_one: GroupOfOne) -> Tensor:
    """Apply `group_of_one`. Returns the dtype of the rewards, fp32 if they are whole numbers."""
    rewards_N = rewards_N if rewards_N.is_floating_point() else rewards_N.float()
    advantages_N = advantages_N.to(rewards_N.dtype)
    return advantages_N if group_of_one == "zero" else torch.where(groups.size_N == 1, rewards_N, advantages_N)


def group_centred(rewards_N: Tensor, groups_N: Tensor, *, group_of_one: GroupOfOne = "zero") -> Tensor:
    """r less the mean reward of its group: Dr. GRPO, and the baseline of REINFORCE++.

    Shapes:  rewards_N [N], groups_N [N] integers, equal for responses to one prompt, in any order -> [N]
    Source:  Liu et al. 2025, section 3.2; Hu 2025 (REINFORCE++), section 3
    """
    groups = _centre_groups(rewards_N, groups_N)
    return _with_single(groups.centred_N, rewards_N, groups, group_of_one)


def group_relative(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    unbiased: bool = True,
    of_all: bool = False,
    counted_N: Tensor | None = None,
    eps: float = 1e-6,
    floor: float = 0.0,
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """GRPO: how much better a response is than its siblings, (r - mean) / (max(std, floor) + eps) within its group.

    Shapes:  rewards_N [N], groups_N [N] integers, equal for responses to one prompt, in any order -> [N]
    Maths:   std is the unbiased one (divided by the group's size - 1), as in code that calls `torch.std`, or the
             biased one. A group of equal rewards gives zeros, whatever eps and floor are
    of_all:  divide by the std of all N rewards in place of the group's, or of those that `counted_N` [N] bool marks
    Source:  DeepSeekMath (Shao et al. 2024), section 4.1.2, which does not say which std
    Others:  eps is 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF, all with the unbiased std. `of_all` is TRL's
             scale_rewards: batch
    """
    groups = _centre_groups(rewards_N, groups_N)
    if of_all:
        all_N = rewards_N.double() if counted_N is None else rewards_N.double()[counted_N]
        squares = (all_N - all_N.mean()).square().sum()
        std_N = (squares / max(len(all_N) - int(unbiased), 1)).sqrt().expand_as(rewards_N)
    else:
        squares_G = _over_groups("sum", groups.centred_N.square(), groups.index_N, groups.size_G)
        freedom_N = (groups.size_N - 1).clamp(min=1) if unbiased else groups.size_N
        std_N = (squares_G[groups.index_N] / freedom_N).sqrt()
    divisor_N = std_N.clamp(min=floor) + eps
    scaled_N = torch.where(divisor_N > 0, groups.centred_N / divisor_N, 0.0)
    return _with_single(scaled_N, rewards_N, groups, group_of_one)


def leave_one_out(rewards_N: Tensor, groups_N: Tensor, *, group_of_one: GroupOfOne = "zero") -> Tensor:
    """RLOO: r_i minus the mean reward of the other responses to the same prompt.

    Shapes:  rewards_N [N], groups_N [N] integers -> [N]
    Maths:   r_i - mean_{j != i} r_j = k / (k - 1) * (r_i - mean r) for a group of k
    Source:  Kool et al. 2019; Ahmadian et al. 2024, eq. 8
    """
    groups = _centre_groups(rewards_N, groups_N)
    factor_N = groups.size_N / (groups.size_N - 1).clamp(min=1)
    return _with_single(groups.centred_N * factor_N, rewards_N, groups, group_of_one)


def alone_in_group(groups_N: Tensor) -> Tensor:
    """Mark samples that are alone in their group: [N] integers -> [N] bool."""
    _, index_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    return size_G[index_N] == 1


def without_signal(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Mark samples of groups with equal rewards, from which nothing is learnt: [N], [N] -> [N] bool."""
    groups = _centre_groups(rewards_N, groups_N)
    differ_G = _over_groups("max", groups.centred_N.abs(), groups.index_N, groups.size_G) > 0
    return ~differ_G[groups.index_N]


def explained_variance(var_returns: Tensor, var_residuals: Tensor) -> float:
    """Share of the returns' variance that the values predict: 1 all; 0 as much as their mean would; below 0 less.

    Shapes:  0-d each: the variance of the returns, and of returns less values
    Maths:   1 - var(returns - values) / var(returns), both biased; 0 where all returns are equal
    """
    return float(torch.where(var_returns > 0, 1 - var_residuals / var_returns, 0.0))
