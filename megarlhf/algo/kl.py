"""Estimators of the KL divergence from samples.

No axes are assumed: log-probs of the same sampled tokens in any one shape, nats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]

_MAX_LOG_RATIO = 20.0

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
    "abs": lambda log_ratio: log_ratio.abs(),
}
"""Estimators as functions of log r = ref_logprob - logprob; see `kl_estimate`."""


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind | Callable[[Tensor], Tensor], clamp: float | None = None
) -> Tensor:
    """Estimate KL(pi || ref) per token, from tokens that pi sampled.

    Shapes:  any, equal -> the same
    Maths:   with log r = ref_logprob - logprob,
             k1 = -log r             value unbiased, high variance, may be negative
             k2 = (log r)^2 / 2      value biased, never negative
             k3 = (r - 1) - log r    value unbiased, low variance, never negative
             abs = |log r|           no estimate of the KL: a bound on how far each token may go
             a function of log r     another one
    clamp:   log r is held in [-20, 20], then the estimate in [-clamp, clamp]; no gradient flows beyond either. None:
             nothing is held
    As a reward (no gradient flows through it) k1 is the right one: the policy gradient with it is that of KL.
    As a loss (autograd through the estimate, tokens on-policy) the expected gradient of
             k1 is zero: it regularises nothing
             k2 is that of KL(pi || ref): the right one
             k3 is that of KL(ref || pi): near to it where pi is near ref, and not the same
             `ratio_weighted` makes that of k1 and k3 the one of KL(pi || ref)
    Others:  verl's low_var_kl is k3 with clamp 10, its mse is k2; OpenRLHF has clamp 10 for all; TRL holds nothing, and
             weighs k3 by the ratio
    Source:  Schulman, "Approximating KL divergence" (2020); tests/algo/test_kl.py works the gradients out
    """
    estimator = kind if callable(kind) else KL_ESTIMATORS.get(kind)
    if estimator is None:
        raise ValueError(f"unknown KL estimator {kind!r}; the known ones are {', '.join(KL_ESTIMATORS)}")
    log_ratio = ref_logprobs - logprobs
    if clamp is None:
        return estimator(log_ratio)
    return estimator(log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)).clamp(-clamp, clamp)


def ratio_weighted(kl: Tensor, log_ratio: Tensor) -> Tensor:
    """An estimate whose gradient, as a loss, is that of KL(pi || ref), also on samples that an older policy drew.

    Shapes:  any, equal -> the same
    Maths:   kl exp(log_ratio), log_ratio = log pi - log pi_old of the token. On-policy the gradient is
             kl grad log pi + grad kl: with k1 the second has mean 0, with k3 it takes away what k3 alone adds
    Source:  DeepSeek-V3.2 (2025), section 3.1; TRL's use_bias_correction_kl
    """
    return kl * log_ratio.exp()


def adapted_coefficient(coef: float, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """The KL's coefficient after a step, so that the KL comes to `target`.

    Maths:   coef (1 + num_samples / horizon x clip(kl / target - 1, -0.2, 0.2))
    Source:  Ziegler et al. 2019, section 2.2, where kl is summed over a response; here both are in one unit, whichever
    Others:  the same in verl, TRL and OpenRLHF; verl counts samples too, and its kl is a mean per token
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
