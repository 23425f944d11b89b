"""Rewards on a common scale, before their weighted sum.

A reward that does not apply is NaN; it counts in no mean and no deviation, and stays.

Legend: N samples, G groups, K rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarlhf.algo.advantages import group_relative


def group_normalised(values_N: Tensor, groups_N: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) among the values of each group; 0 where they are equal, or where there is one.

    Shapes:  values_N [N], groups_N [N] integers -> [N]
    Source:  GDPO (2026): each reward by itself, so that none drowns the others in the sum; the std is the unbiased one,
             as in verl's gdpo
    """
    present_N = ~values_N.isnan()
    out_N = values_N.clone()
    if bool(present_N.any()):
        out_N[present_N] = group_relative(values_N[present_N], groups_N[present_N], eps=eps)
    return out_N


def weighted_total(values_KN: Tensor, weights: Sequence[float], failed_KN: Tensor | None = None) -> Tensor:
    """Each sample's reward: the sum of weight x value over the rewards that apply to it.

    Shapes:  values_KN [K, N], K weights, failed_KN [K, N] bool -> [N]
    NaN:     where no reward applies, and where one has failed: the sum of the others would count it as 0
    Note:    added up in fp64. Of fp64 values, rounded to fp32 afterwards, sums that are equal on paper are equal: a
             deviation of rounding would be divided by
    """
    weights_K1 = torch.tensor(weights, dtype=torch.float64, device=values_KN.device)[:, None]
    missing_KN = values_KN.isnan()
    lost_N = missing_KN.all(0) if failed_KN is None else missing_KN.all(0) | failed_KN.any(0)
    total_N = (weights_K1 * values_KN.double()).masked_fill(missing_KN, 0.0).sum(0)
    return total_N.to(values_KN.dtype).masked_fill(lost_N, float("nan"))


class RunningMoments:
    """Mean and deviation of all values seen, updated a batch at a time.

    Source:  Chan, Golub and LeVeque 1979, which adds two sets of moments without a loss of digits
    """

    def __init__(self, count: float = 0.0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def update(self, values_N: Tensor) -> None:
        """Take in the values that are not NaN."""
        values_N = values_N[~values_N.isnan()].double()
        if not len(values_N):
            return
        count, mean = len(values_N), float(values_N.mean())
        squares = float((values_N - mean).square().sum())
        total, apart = self.count + count, mean - self.mean
        self.mean += apart * count / total
        self.squares += squares + apart**2 * self.count * count / total
        self.count = total

    def normalise(self, values_N: Tensor, *, eps: float = 1e-6) -> Tensor:
        """(r - mean) / (std + eps), the std divided by the count."""
        deviation = (self.squares / max(self.count, 1.0)) ** 0.5
        return (values_N - self.mean) / (deviation + eps)
