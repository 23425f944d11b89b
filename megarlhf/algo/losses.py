"""Losses: sums over what is here, divided by a denominator the caller states.

Axes: B rows, T positions, N pairs. A row is one response, or several end to end (packed): then `lengths_BT` says of
each response token how long its response is. `mask_BT` is bool and marks response tokens; what stands elsewhere (even
NaN) changes neither loss nor gradient.

`denominator` counts over the whole mini-batch and all data-parallel ranks: response tokens, sequences or
pairs, as each function says. The caller sums the losses of micro-batches and the gradients of ranks, and any
split of the mini-batch gives the same loss and gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarlhf.algo.kl import KL_ESTIMATORS, KLKind, kl_estimate

Aggregation = Literal["token", "sequence"]
Denominator = int | float | Tensor

# exp of a log-ratio beyond this says only that something is wrong; inf would make NaN gradients of it.
_MAX_LOG_RATIO = 20.0


def token_weights(
    mask_BT: Tensor, kind: Aggregation, *, denominator: Denominator, lengths_BT: Tensor | None = None
) -> Tensor:
    """How much each token counts; over the whole mini-batch the weights sum to 1.

    Shapes:  mask_BT [B, T] -> [B, T] fp32, zero where the mask is False
             lengths_BT [B, T]: response tokens of the response that a token belongs to; None: each row is one response
    kind:    'token': the mean over response tokens (DAPO, Yu et al. 2025); denominator: response tokens
             'sequence': the mean over sequences of each one's token mean (GRPO, Shao et al. 2024, eq. 3);
             denominator: sequences of the mini-batch; one without a response token adds nothing to the sum
    """
    weights_BT = mask_BT.float()
    if kind == "sequence":
        if lengths_BT is None:
            lengths_BT = weights_BT.sum(dim=1, keepdim=True)
        weights_BT = weights_BT / lengths_BT.clamp(min=1)
    elif kind != "token":
        raise ValueError(f"unknown aggregation {kind!r}; the known ones are token, sequence")
    return weights_BT / denominator


def _masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x with zero on padding; before any nonlinearity, so that NaN there reaches no gradient."""
    return torch.where(mask_BT, x_BT, torch.zeros_like(x_BT))


def token_nll(logprobs_BT: Tensor, mask_BT: Tensor, *, denominator: Denominator) -> Tensor:
    """Negative log-likelihood of the response tokens. Denominator: response tokens of the mini-batch. 0-d."""
    return -_masked(logprobs_BT, mask_BT).sum() / denominator


class PolicyLossOutput(NamedTuple):
    """The loss, and detached sums that add up over micro-batches and ranks (`ratio_max` by maximum)."""

    loss: Tensor
    clipped: Tensor
    """Response tokens where the clipped term was the larger loss, so that no gradient flows."""
    ratio_sum: Tensor
    """Sum of new over old probability; over the response tokens it has mean 1 on-policy."""
    ratio_max: Tensor
    """The largest ratio; 0 without a token."""
    kl_sum: Tensor
    """Sum of k3 of old against new: how far the policy moved since sampling, nats."""


def clipped_policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: Denominator,
    aggregation: Aggregation = "token",
    lengths_BT: Tensor | None = None,
) -> PolicyLossOutput:
    """PPO's clipped surrogate, negated.

    Shapes:  all [B, T] -> 0-d each
    Maths:   ratio = exp(logprob - old_logprob);
             max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A), weighted by `token_weights`
    Source:  Schulman et al. 2017, eq. 7; unequal bounds: DAPO, Yu et al. 2025, eq. 10
    Denominator: response tokens of the mini-batch ('token') or its sequences ('sequence')
    Note:    a log-ratio beyond +-20 is held there and gives no gradient
    """
    log_ratio_BT = _masked(logprobs_BT - old_logprobs_BT, mask_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    advantages_BT = _masked(advantages_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -ratio_BT * advantages_BT
    clipped_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    weights_BT = token_weights(mask_BT, aggregation, denominator=denominator, lengths_BT=lengths_BT)
    loss = (torch.maximum(plain_BT, clipped_BT) * weights_BT).sum()
    with torch.no_grad():
        masked_ratio_BT = _masked(ratio_BT, mask_BT)
        return PolicyLossOutput(
            loss=loss,
            clipped=(clipped_BT > plain_BT).sum(),
            ratio_sum=masked_ratio_BT.sum(),
            ratio_max=masked_ratio_BT.max() if masked_ratio_BT.numel() else masked_ratio_BT.sum(),
            kl_sum=KL_ESTIMATORS["k3"](log_ratio_BT).sum(),
        )


class ValueLossOutput(NamedTuple):
    """The loss, and a detached count that adds up over micro-batches and ranks."""

    loss: Tensor
    clipped: Tensor
    """Response tokens where the clipped value had the larger error."""


def clipped_value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None,
    denominator: Denominator,
) -> ValueLossOutput:
    """Squared error of the critic, not rewarded for moving further than `clip` from its old value.

    Shapes:  all [B, T] -> 0-d each
    Maths:   0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); clip=None: 0.5 (V - R)^2
    Source:  OpenAI baselines' ppo2; Engstrom et al. 2020
    Denominator: response tokens of the mini-batch
    """
    values_BT, old_values_BT, returns_BT = (_masked(x_BT, mask_BT) for x_BT in (values_BT, old_values_BT, returns_BT))
    error_BT = (values_BT - returns_BT).square()
    if clip is None:
        return ValueLossOutput(0.5 * error_BT.sum() / denominator, mask_BT.sum() * 0)
    held_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    held_error_BT = (held_BT - returns_BT).square()
    loss = 0.5 * torch.maximum(error_BT, held_error_BT).sum() / denominator
    return ValueLossOutput(loss, (held_error_BT > error_BT).sum())


def pairwise_last_token(chosen_N: Tensor, rejected_N: Tensor, *, denominator: Denominator) -> Tensor:
    """Bradley-Terry on one score a response: -log sigmoid(chosen - rejected).

    Shapes:  chosen_N, rejected_N [N] -> 0-d
    Source:  InstructGPT (Ouyang et al. 2022), eq. 1
    Denominator: pairs of the mini-batch
    """
    return -logsigmoid(chosen_N - rejected_N).sum() / denominator


def centering(chosen_N: Tensor, rejected_N: Tensor, *, denominator: Denominator) -> Tensor:
    """(chosen + rejected)^2: holds the scores' level, which a ranking loss leaves free, near zero.

    Shapes:  chosen_N, rejected_N [N] -> 0-d
    Source:  Eisenstein et al. 2023, eq. 2
    Denominator: pairs of the mini-batch
    """
    return (chosen_N + rejected_N).square().sum() / denominator


def pairwise_aligned_span(
    chosen_scores_BT: Tensor,
    rejected_scores_BT: Tensor,
    chosen_tokens_BT: Tensor,
    rejected_tokens_BT: Tensor,
    chosen_lengths_B: Tensor,
    rejected_lengths_B: Tensor,
    *,
    denominator: Denominator,
) -> Tensor:
    """Bradley-Terry on a score a token, from where the two texts part to the end of the longer one.

    Shapes:  scores and tokens [B, T] (chosen and rejected may differ in T), right-padded and starting at the
             same token (both at the prompt, or both at the response); lengths [B], at least 1 -> 0-d
    Maths:   per pair the mean over the span of -log sigmoid(chosen_t - rejected_t), then the sum over pairs.
             The span starts at the first differing token, or at the end of the shorter text if it is a prefix
             of the longer. Past the shorter text's end its last score is held.
    Source:  DeepSpeed-Chat (Yao et al. 2023), which reads there the scores the model gives to padding tokens.
             We hold the last one instead, so that the loss does not depend on which token pads, and the
             score trained past the end is the one that is used as the response's reward.
    Denominator: pairs of the mini-batch
    Note:    equal texts compare their last token: log 2, and a gradient that cancels in a shared model
    """
    num_positions = max(chosen_tokens_BT.shape[1], rejected_tokens_BT.shape[1])
    positions_T = torch.arange(num_positions, device=chosen_tokens_BT.device)[None, :]
    shorter_B = torch.minimum(chosen_lengths_B, rejected_lengths_B)
    longer_B = torch.maximum(chosen_lengths_B, rejected_lengths_B)
    chosen_index_BT = torch.minimum(positions_T, chosen_lengths_B[:, None] - 1)
    rejected_index_BT = torch.minimum(positions_T, rejected_lengths_B[:, None] - 1)

    same_BT = chosen_tokens_BT.gather(1, chosen_index_BT) == rejected_tokens_BT.gather(1, rejected_index_BT)
    common_BT = same_BT & (positions_T < shorter_B[:, None])
    first_B = torch.minimum(common_BT.long().cumprod(dim=1).sum(dim=1), longer_B - 1)
    span_BT = (positions_T >= first_B[:, None]) & (positions_T < longer_B[:, None])

    margin_BT = chosen_scores_BT.gather(1, chosen_index_BT) - rejected_scores_BT.gather(1, rejected_index_BT)
    loss_BT = -logsigmoid(margin_BT) * span_BT
    return (loss_BT.sum(dim=1) / (longer_B - first_B)).sum() / denominator


def kl_penalty(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    kind: KLKind,
    denominator: Denominator,
    aggregation: Aggregation = "token",
    lengths_BT: Tensor | None = None,
) -> Tensor:
    """KL against the reference as a term of the loss; `kl_estimate` says which kind has which gradient.

    Shapes:  all [B, T] -> 0-d
    Denominator: response tokens of the mini-batch ('token') or its sequences ('sequence')
    """
    kl_BT = kl_estimate(_masked(logprobs_BT, mask_BT), _masked(ref_logprobs_BT, mask_BT), kind)
    return (kl_BT * token_weights(mask_BT, aggregation, denominator=denominator, lengths_BT=lengths_BT)).sum()


def entropy_bonus(
    entropy_BT: Tensor,
    mask_BT: Tensor,
    *,
    denominator: Denominator,
    aggregation: Aggregation = "token",
    lengths_BT: Tensor | None = None,
) -> Tensor:
    """Mean entropy of the response tokens' distributions, nats; it is subtracted from a loss.

    Shapes:  all [B, T] -> 0-d
    Denominator: response tokens of the mini-batch ('token') or its sequences ('sequence')
    """
    weights_BT = token_weights(mask_BT, aggregation, denominator=denominator, lengths_BT=lengths_BT)
    return (_masked(entropy_BT, mask_BT) * weights_BT).sum()
