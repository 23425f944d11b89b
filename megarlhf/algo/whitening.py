"""Sums over sequences and groups, and whitening by them: the specification, in plain loops.

`kernels/packed.py` computes the same fast and is tested against this.

Legend: T tokens of all sequences end to end, N sequences, 3: sum, sum of squares, count.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def moments(x_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Sum x, sum x^2 and the count of each sequence's tokens inside the mask, added one after the other in fp64.

    Shapes:  x_T [T], mask_T [T] bool (None: all), cu_seqlens [N + 1] integers -> [N, 3] fp64
    Maths:   mean = sum x / count, variance = sum x^2 / count - mean^2
    """
    moments_N3 = torch.zeros(len(cu_seqlens) - 1, 3, dtype=torch.float64, device=x_T.device)
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for t in range(start, end):
            if mask_T is None or bool(mask_T[t]):
                x = x_T[t].double()
                moments_N3[n] += torch.stack([x, x * x, torch.ones_like(x)])
    return moments_N3


def group_moments(moments_N3: Tensor, groups_N: Tensor) -> Tensor:
    """For each sequence the sum of the moments of its group's sequences, in their order: [N, 3] -> [N, 3]."""
    totals: dict[int, Tensor] = {}
    for group, moments_3 in zip(groups_N.tolist(), moments_N3, strict=True):
        totals[group] = totals[group] + moments_3 if group in totals else moments_3
    return torch.stack([totals[group] for group in groups_N.tolist()]) if totals else moments_N3


def whiten(
    x_T: Tensor, mask_T: Tensor | None, cu_seqlens: Tensor, mean_N: Tensor, scale_N: Tensor, *, shift_mean: bool = True
) -> Tensor:
    """(x - mean) * scale of its sequence, plus the mean unless `shift_mean`; in fp64, and zero outside the mask.

    Shapes:  x_T [T], mask_T [T] bool (None: all), cu_seqlens [N + 1] integers, mean_N and scale_N [N] fp64 -> [T]
    Maths:   whitening has scale = 1 / sqrt(variance + eps), the variance divided by the count
    """
    whitened_T = torch.zeros_like(x_T)
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for t in range(start, end):
            if mask_T is None or bool(mask_T[t]):
                whitened_T[t] = (x_T[t].double() - mean_N[n]) * scale_N[n] + (0.0 if shift_mean else mean_N[n])
    return whitened_T
