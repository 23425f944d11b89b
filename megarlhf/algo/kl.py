"""Estimators of the KL divergence from samples.

No axes are assumed: log-probs of the same sampled tokens in any one shape, nats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
"""From log r = ref_logprob - logprob; `kl_estimate` says what each is."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(pi || ref) per token, from tokens that pi sampled.

    Shapes:  any, equal -> the same
    Maths:   with log r = ref_logprob - logprob,
             k1 = -log r             value unbiased, high variance, may be negative
             k2 = (log r)^2 / 2      value biased, never negative
             k3 = (r - 1) - log r    value unbiased, low variance, never negative
    As a reward (no gradient flows through it) k1 is the right one: the policy gradient with it is that of KL.
    As a loss (autograd through the estimate, tokens on-policy) the expected gradient of
             k1 is zero: it regularises nothing
             k2 is that of KL(pi || ref): the right one
             k3 is that of KL(ref || pi): near to it where pi is near ref, and not the same
    Source:  Schulman, "Approximating KL divergence" (2020); tests/algo/test_kl.py works the gradients out
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}; the known ones are {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[kind](ref_logprobs - logprobs)
