"""Losses of the supervised commands and of the critic: sums over what is here, divided by what the caller states.

The policy's is in policy.py. Axes: B rows, T positions, N pairs; of the critic's loss T response tokens end to end.
`mask_BT` is bool and marks response tokens; values elsewhere (even NaN) change neither loss nor gradient.

`denominator` counts over the whole mini-batch and all data-parallel ranks: response tokens or pairs, as each function
says. The caller sums the losses of micro-batches and the gradients of ranks, and any split of the mini-batch gives the
same loss and gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Denominator = int | float | Tensor


def token_nll(logprobs_BT: Tensor, mask_BT: Tensor, *, denominator: Denominator) -> Tensor:
    """Negative log-likelihood of the response tokens. Denominator: response tokens of the mini-batch. 0-d."""
    return -torch.where(mask_BT, logprobs_BT, torch.zeros_like(logprobs_BT)).sum() / denominator


class ValueLossOutput(NamedTuple):
    """The loss, and a detached count that adds up over micro-batches and ranks."""

    loss: Tensor
    clipped: Tensor
    """Response tokens where the clipped value had the larger error."""


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, *, clip: float | None
) -> ValueLossOutput:
    """Squared error of the critic, not rewarded for moving further than `clip` from its old value.

    Shapes:  all [T] -> 0-d
    Maths:   sum of weight x 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); clip=None: 0.5 (V - R)^2
    Source:  OpenAI baselines' ppo2; Engstrom et al. 2020
    Denominator: in the weights (`averaging.response_weights`)
    """
    error_T = (values_T - returns_T).square()
    if clip is None:
        return ValueLossOutput(0.5 * (error_T * weights_T).sum(), torch.zeros_like(error_T).sum().detach())
    held_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    held_error_T = (held_T - returns_T).square()
    loss = 0.5 * (torch.maximum(error_T, held_error_T) * weights_T).sum()
    return ValueLossOutput(loss, (held_error_T > error_T).sum())


def pairwise_ranking(
    chosen_N: Tensor, rejected_N: Tensor, *, denominator: Denominator, margin_N: Tensor | None = None
) -> Tensor:
    """Bradley-Terry on one score a response: -log sigmoid(chosen - rejected - margin).

    Shapes:  chosen_N, rejected_N, margin_N [N] -> 0-d
    Source:  InstructGPT (Ouyang et al. 2022), eq. 1; the margin, by how much a pair should differ: Llama 2 (Touvron et
             al. 2023), eq. 2
    Denominator: pairs of the mini-batch
    """
    difference_N = chosen_N - rejected_N
    return -logsigmoid(difference_N if margin_N is None else difference_N - margin_N).sum() / denominator


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
