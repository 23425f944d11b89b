"""Figures of an evaluation with 95% confidence intervals, from one value for each prompt.

Responses to one prompt are similar, so the prompt is the unit: each figure is a mean over prompts. In 95 of 100
evaluations its interval contains the mean over all prompts of the kind.

Legend: P prompts (or pairs, or texts), n and m samples of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarlhf.algo.calibration import Z_95

_T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Student's t at 97.5% for 1 to 10 degrees of freedom, where the series in `t_95` is not close."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval."""

    value: float
    low: float | None
    """Lower bound. None: a single prompt does not determine it."""
    high: float | None
    prompts: int
    """Number of prompts in the mean."""


def t_95(freedom: int) -> float:
    """Student's t at 97.5%, of the interval of a mean of `freedom` + 1 values. Source: Abramowitz and Stegun 26.7.5."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z, v = Z_95, float(freedom)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def mean_of(values_P: Tensor) -> Estimate:
    """The mean and Student's interval over prompts; NaN values are left out.

    Raises: ValueError where none is left.
    """
    values_P = _known(values_P)
    count, mean = len(values_P), float(values_P.mean())
    if count < 2:
        return Estimate(mean, None, None, count)
    half = t_95(count - 1) * float(values_P.std()) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def share_of(values_P: Tensor) -> Estimate:
    """The mean of values in [0, 1] and Wilson's interval over prompts, which stays in [0, 1] and does not shrink to a
    point where all prompts agree on 0 or 1; NaN values are left out.

    Wilson's interval is of a share of `count` trials. Values between 0 and 1 vary less than such trials do: they count
    as the number of trials whose mean would have their variance (Korn and Graubard 1998, Dean and Pagano 2015).

    Raises: ValueError where none is left.
    """
    values_P = _known(values_P)
    count, share = len(values_P), float(values_P.mean())
    spread, variance = share * (1 - share), float(values_P.var(correction=0))
    if spread <= 0:
        trials = float(count)
    elif variance <= spread / 1e12:
        bound = share if count > 1 else None
        return Estimate(share, bound, bound, count)
    else:
        trials = count * spread / variance
    only_0_or_1 = bool(((values_P == 0) | (values_P == 1)).all())
    if count < 2 and not only_0_or_1:
        return Estimate(share, None, None, count)
    z = Z_95 if only_0_or_1 else t_95(count - 1)
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(spread / trials + z**2 / (4 * trials**2))
    low = 0.0 if share == 0 else max(0.0, middle - half)  # the two are equal there, but for rounding
    return Estimate(share, low, 1.0 if share == 1 else min(1.0, middle + half), count)


def ratio_of(sums_P: Tensor, weights_P: Tensor) -> Estimate:
    """sum(sums) / sum(weights), such as nats per token over texts, and its interval by the residuals sums - ratio x
    weights (linearised, Cochran 1977, 2.11).

    Raises: ValueError for weights that add up to nothing.
    """
    sums_P, weights_P = sums_P.double(), weights_P.double()
    total, count = float(weights_P.sum()), len(sums_P)
    if not total > 0:
        raise ValueError("a mean over nothing: all weights are 0")
    ratio = float(sums_P.sum()) / total
    if count < 2:
        return Estimate(ratio, None, None, count)
    residuals_P = sums_P - ratio * weights_P
    half = t_95(count - 1) * math.sqrt(float(residuals_P.square().sum()) * count / (count - 1)) / total
    return Estimate(ratio, ratio - half, ratio + half, count)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that one of `k` samples, drawn from `samples` without replacement, is among the `correct` ones:
    1 - C(n - c, k) / C(n, k), an unbiased estimate of the chance of k new samples. Source: Chen et al. 2021, eq. 1.

    Raises: ValueError for fewer samples than k: there is no unbiased estimate then.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {correct} of them correct: give 1 <= k <= samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_at_k_of(right_PN: Tensor, k: int) -> Tensor:
    """[P] fp64: `pass_at_k` of each prompt, NaN where fewer than k samples were judged.

    Shapes: right_PN [P, n] of 0, 1 and NaN: judged wrong, judged right, not judged
    """
    judged_P, correct_P = (~right_PN.isnan()).sum(1), (right_PN == 1).sum(1)
    rows = zip(judged_P.tolist(), correct_P.tolist(), strict=True)
    return torch.tensor([pass_at_k(n, c, k) if n >= k else math.nan for n, c in rows], dtype=torch.float64)


def wins_of(ours_PN: Tensor, theirs_PM: Tensor) -> Tensor:
    """[P] fp64: the share of pairs of a prompt's responses, one of either model, in which ours has the higher reward; a
    tie counts half. NaN where either model has no response with a reward.

    Every response is compared with every one of the other model, which has the mean of comparing them one by one and a
    smaller variance (Mann and Whitney 1947).

    Shapes: ours_PN [P, n], theirs_PM [P, m]; NaN: no reward
    """
    difference_PNM = ours_PN.double()[:, :, None] - theirs_PM.double()[:, None, :]
    known_PNM = ~difference_PNM.isnan()
    score_PNM = torch.where(difference_PNM == 0, 0.5, (difference_PNM > 0).double())
    return (score_PNM * known_PNM).sum((1, 2)) / known_PNM.sum((1, 2))


def ties_of(ours_PN: Tensor, theirs_PM: Tensor) -> Tensor:
    """[P] fp64: the share of the same pairs that have equal rewards; NaN as in `wins_of`."""
    difference_PNM = ours_PN.double()[:, :, None] - theirs_PM.double()[:, None, :]
    known_PNM = ~difference_PNM.isnan()
    return ((difference_PNM == 0) & known_PNM).double().sum((1, 2)) / known_PNM.sum((1, 2))


def _known(values_P: Tensor) -> Tensor:
    values_P = values_P.double()
    values_P = values_P[~values_P.isnan()]
    if not len(values_P):
        raise ValueError("a mean of nothing: there is no value")
    return values_P
