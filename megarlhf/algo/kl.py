"""Estimators of the KL divergence from samples, and the controller of its coefficient.

No axes are assumed: log-probs of the same sampled tokens in any one shape, nats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}


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
    if kind not in _ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}; the known ones are {', '.join(_ESTIMATORS)}")
    return _ESTIMATORS[kind](ref_logprobs - logprobs)


def adapt_kl_coef(coef: float, observed: float, target: float, horizon: float, num_samples: int) -> float:
    """The next KL coefficient: larger where the observed KL is above its target, smaller where below.

    Maths:   coef * (1 + clip(observed / target - 1, -0.2, 0.2) * num_samples / horizon)
    Units:   observed and target in the same (nats per response, say); horizon in samples, as num_samples
    Source:  Ziegler et al. 2019, section 2.2
    Raises:  ValueError if target or horizon is not positive, or one update could turn the sign
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(
            f"adaptive KL needs a target and a horizon above zero, got {target=} and {horizon=}; "
            "set both, or use a fixed coefficient"
        )
    if 0.2 * num_samples >= horizon:
        raise ValueError(
            f"adaptive KL with horizon {horizon} and {num_samples} samples an update could reach a "
            f"coefficient of zero or below; set a horizon above {0.2 * num_samples:g} samples"
        )
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_samples / horizon)
