"""The policy loss, composed: ratio x surrogate x token weight x aggregation.

A loss of this family is chosen by one entry of each of four tables:

- the *ratio* of new to old probability, of a token or of its whole response: `RATIOS`
- the *surrogate*, what is minimised at a token, from ratio and advantage: `SURROGATES`
- a *weight* of each token, such as the correction of a rollout in other numerics (`rollout_correction.py`)
- the *aggregation*, how much a token counts in the mini-batch: `averaging.py`

Tokens of responses stand end to end, without prompts and padding. Give fp32 or fp64; results have the dtype of the
input.

Legend: T response tokens of all responses end to end, N responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megarlhf.algo.segments import Segments

RatioKind = Literal["token", "sequence", "geometric"]
SurrogateKind = Literal["clip", "cispo", "sapo", "policy_gradient"]

# exp of a log-ratio beyond this says only that something is wrong; inf would make NaN gradients of it.
MAX_LOG_RATIO = 20.0


def _token(log_ratio_T: Tensor, responses: Segments) -> Tensor:
    return log_ratio_T


def _sequence(log_ratio_T: Tensor, responses: Segments) -> Tensor:
    return responses.repeat(responses.sums(log_ratio_T))


def _geometric(log_ratio_T: Tensor, responses: Segments) -> Tensor:
    return responses.repeat(responses.means(log_ratio_T))


RATIOS: dict[RatioKind, Callable[[Tensor, Segments], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "geometric": _geometric,
}
"""Ratios as functions of the tokens' log-ratios; see `log_ratios`."""


def log_ratios(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    responses: Segments,
    kind: RatioKind | Callable[[Tensor, Segments], Tensor],
) -> Tensor:
    """log of new over old probability, as each token's loss sees it.

    Shapes:  logprobs_T, old_logprobs_T [T] -> [T]
    kind:    'token': log p - log p_old of the token itself (PPO, GRPO)
             'sequence': the sum over its response: the ratio of the responses' probabilities. Its variance grows with
             the length
             'geometric': the mean over its response, so that the ratio is the geometric mean of the tokens'
             (GSPO, Zheng et al. 2025, eq. 7)
             a function of (log_ratio_T, responses): another one
    Note:    held in [-20, 20], beyond which no gradient flows; of a whole response, where its sum or mean lies beyond
    """
    function = kind if callable(kind) else RATIOS.get(kind)
    if function is None:
        raise ValueError(f"unknown ratio {kind!r}; the known ones are {', '.join(RATIOS)}")
    return function(logprobs_T - old_logprobs_T, responses).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Numbers that surrogates read; each says which."""

    low: float | None = 0.2
    """clip, cispo: the ratio is held at 1 - low or above. None: no bound from below."""
    high: float = 0.2
    """clip, cispo: the ratio is held at 1 + high or below."""
    dual: float | None = None
    """clip: where the advantage is negative, the loss is at most dual x its size."""
    delta: float | None = None
    """clip: the unclipped ratio is held at delta or below."""
    temperature_positive: float = 1.0
    """sapo: of the gate where the advantage is positive."""
    temperature_negative: float = 1.05
    """sapo: of the gate where it is not."""


class Surrogate(NamedTuple):
    """Result of a surrogate for each token."""

    loss_T: Tensor
    clipped_T: Tensor
    """bool: a bound is in force, so that this token's ratio gives no gradient (`cispo`: a smaller one)."""


def clip(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, bounds: Bounds) -> Surrogate:
    """PPO's clipped surrogate, negated, with the bounds that others have added.

    Maths:   max(-min(r, delta) A, -clip(r, 1 - low, 1 + high) A), and at most dual |A| where A < 0
    Source:  Schulman et al. 2017, eq. 7. Unequal low and high ("clip-higher"): DAPO, Yu et al. 2025, eq. 10.
             dual: Ye et al. 2020, eq. 5, there 3. delta ("two-sided"): INTELLECT-2, Prime Intellect 2025, eq. 3; only
             above 1 + high does it say anything, and then the same as a dual of the same size
    """
    ratio_T = log_ratio_T.exp()
    capped_T = ratio_T if bounds.delta is None else ratio_T.clamp(max=bounds.delta)
    plain_T = -capped_T * advantages_T
    lowest = None if bounds.low is None else 1 - bounds.low
    held_T = -ratio_T.clamp(lowest, 1 + bounds.high) * advantages_T
    loss_T, clipped_T = torch.maximum(plain_T, held_T), held_T > plain_T
    if bounds.delta is not None:
        clipped_T = clipped_T | ((ratio_T > bounds.delta) & (advantages_T < 0))
    if bounds.dual is not None:
        most_T = -bounds.dual * advantages_T
        beyond_T = (advantages_T < 0) & (loss_T > most_T)
        loss_T, clipped_T = torch.where(beyond_T, most_T, loss_T), clipped_T | beyond_T
    return Surrogate(loss_T, clipped_T)


def cispo(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, bounds: Bounds) -> Surrogate:
    """CISPO: the bounded ratio weighs the gradient of the log-prob, so that no token loses its gradient.

    Maths:   -sg(clip(r, 1 - low, 1 + high)) A log p
    Source:  MiniMax-M1 (2025), eq. 4 and 5, which has no bound from below (`low` None)
    Others:  TRL's `epsilon_high` is the bound itself, our 1 + high; verl bounds from below too
    """
    lowest = None if bounds.low is None else 1 - bounds.low
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(lowest, 1 + bounds.high)
    return Surrogate(-weight_T * advantages_T * logprobs_T, weight_T != ratio_T)


def sapo(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, bounds: Bounds) -> Surrogate:
    """SAPO: a smooth gate in place of the clip.

    Maths:   -4 / tau sigmoid(tau (r - 1)) A; tau depends on the sign of A. On-policy its gradient is that of -r A
    Source:  Gao et al. 2025, "Soft Adaptive Policy Optimization", eq. 5 and 6
    Note:    nothing is clipped; `clipped_T` is False throughout
    """
    tau_T = torch.where(advantages_T > 0, bounds.temperature_positive, bounds.temperature_negative).to(advantages_T)
    gate_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1)) * (4 / tau_T)
    return Surrogate(-gate_T * advantages_T, torch.zeros_like(advantages_T, dtype=torch.bool))


def policy_gradient(logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, bounds: Bounds) -> Surrogate:
    """The plain policy gradient: no ratio, so that it is right for one update on fresh samples only.

    Maths:   -A log p
    Source:  Williams 1992
    """
    return Surrogate(-advantages_T * logprobs_T, torch.zeros_like(advantages_T, dtype=torch.bool))


SURROGATES: dict[SurrogateKind, Callable[[Tensor, Tensor, Tensor, Bounds], Surrogate]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "policy_gradient": policy_gradient,
}
"""(logprobs_T, log_ratio_T, advantages_T, bounds), all [T], to loss and clipped tokens."""


class PolicyLossOutput(NamedTuple):
    """The loss, and detached sums that add up over micro-batches and ranks."""

    loss: Tensor
    clipped: Tensor
    """Tokens at which a bound was in force."""
    ratio_deviation: Tensor
    """Sum of |r - 1| over tokens, r being the ratio of the loss."""
    policy_kl: Tensor
    """Sum over tokens of k3 of old against new: how far the policy moved since sampling, nats."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    responses: Segments,
    *,
    surrogate: SurrogateKind | Callable[[Tensor, Tensor, Tensor, Bounds], Surrogate] = "clip",
    ratio: RatioKind | Callable[[Tensor, Segments], Tensor] = "token",
    bounds: Bounds = Bounds(),
) -> PolicyLossOutput:
    """Sum over tokens of weight x surrogate; surrogate and ratio by name, or as functions like those of the tables.

    Shapes:  logprobs_T, old_logprobs_T, advantages_T [T]; weights_T [T], the aggregation's times the token's own;
             responses: of T tokens -> 0-d each
    Denominator: in the weights (`averaging.response_weights`)
    Note:    values where the weight is 0 must be finite
    """
    function = surrogate if callable(surrogate) else SURROGATES.get(surrogate)
    if function is None:
        raise ValueError(f"unknown policy loss {surrogate!r}; the known ones are {', '.join(SURROGATES)}")
    log_ratio_T = log_ratios(logprobs_T, old_logprobs_T, responses, ratio)
    terms = function(logprobs_T, log_ratio_T, advantages_T, bounds)
    loss = (terms.loss_T * weights_T).sum()
    with torch.no_grad():
        change_T = (old_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return PolicyLossOutput(
            loss=loss,
            clipped=terms.clipped_T.sum(),
            ratio_deviation=(log_ratio_T.exp() - 1).abs().sum(),
            policy_kl=(torch.expm1(-change_T) + change_T).sum(),
        )
