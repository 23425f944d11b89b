"""Statistics of the tokens of all samples of a step, whose columns are spread over ranks.

A rank that has a sample's tokens computes the sample's sum in fp64 and sends it to all ranks. Every rank then adds up
the samples in their order, so a statistic is bit-equal wherever the columns are. Every function is collective.

Legend: N samples of the step, T response tokens on this rank, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.experience import Experience
from megarlhf.kernels import Moments, packed_moments


def sums_of(experience: Experience, *columns_T: Tensor) -> Tensor:
    """Each sample's sums over its tokens: [T] each -> [N, K] fp64."""
    cu_seqlens = experience.rollout_logprobs.cu_seqlens
    return experience.gather_per_sample(torch.stack([packed_moments(x_T, cu_seqlens).total for x_T in columns_T], 1))


def means_of(experience: Experience, *columns_T: Tensor, counted_N: Tensor | None = None) -> list[float]:
    """Means over the tokens of all samples, or of those that `counted_N` [N] bool marks; NaN without any."""
    sums_NK, count = sums_of(experience, *columns_T), num_tokens(experience, counted_N)
    return [float(mean) for mean in _counted(sums_NK, counted_N).sum(0) / count]


def moments_of(experience: Experience, x_T: Tensor, counted_N: Tensor | None = None) -> Moments:
    """Moments (0-d) of a column over the tokens of all samples, or of those that `counted_N` [N] bool marks."""
    moments_N3 = torch.stack(list(packed_moments(x_T, experience.rollout_logprobs.cu_seqlens)), 1)
    return Moments(*_counted(experience.gather_per_sample(moments_N3), counted_N).sum(0))


def variance_of(moments: Moments) -> Tensor:
    """Biased variance, 0-d. Exactly 0 where it is within the rounding of the squares, as for equal tokens."""
    variance = moments.variance()
    return torch.where(variance > 1e-14 * moments.squares / moments.num_elements.clamp(min=1), variance, 0.0)


def largest_of(experience: Experience, x_T: Tensor) -> float:
    """Largest value of a column over all samples; infinite if there is a NaN, which a maximum might ignore."""
    largest = x_T.nan_to_num(nan=torch.inf).amax() if x_T.numel() else x_T.new_tensor(-torch.inf)
    return float(experience.largest(largest))


def num_tokens(experience: Experience, counted_N: Tensor | None = None) -> int:
    """Response tokens of all samples, or of those that are marked."""
    lengths_N = experience.response_lengths_N
    return int(lengths_N.sum() if counted_N is None else lengths_N[counted_N.cpu()].sum())


def _counted(values_NK: Tensor, counted_N: Tensor | None) -> Tensor:
    """Set the rows of samples that do not count to 0, also where they are NaN."""
    if counted_N is None:
        return values_NK
    return torch.where(counted_N.to(values_NK.device)[:, None], values_NK, 0.0)
