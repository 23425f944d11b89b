"""Importance sampling from the distribution that drew the samples to the trainer's at the beginning of the step.

Engine and trainer give a token different log-probs where they compute in other numerics, and where the engine had older
weights. The ratio of the two corrects the gradient for both; it is truncated, or tokens are left out, where it is far
from 1. Of tokens that older weights drew, the level `token` corrects the token and not the tokens before it.

Legend: T response tokens of all responses end to end, N responses.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megarlhf.algo.policy import RatioKind, log_ratios
from megarlhf.algo.segments import Segments

CorrectionKind = Literal["truncate", "mask"]


class Correction(NamedTuple):
    """Corrections of tokens, [T]."""

    weights_T: Tensor
    """Factor of the token's loss."""
    cut_T: Tensor
    """bool: the ratio was truncated, or the token is left out."""
    ratio_T: Tensor
    """The ratio before truncation."""


def rollout_correction(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    responses: Segments,
    *,
    kind: CorrectionKind,
    level: RatioKind,
    low: float,
    high: float,
    mask_weight: Literal["level", "token"] = "level",
) -> Correction:
    """Weights that make samples of the rollout samples of the trainer's policy, but for what is cut.

    Shapes:  logprobs_T: the trainer's before the step's updates; rollout_logprobs_T: the engine's when it drew; [T]
    Maths:   r = exp(logprob - rollout_logprob), of the token or its response (`policy.log_ratios` says which are
             there); 'truncate': min(r, high); 'mask': r where low <= r <= high, else 0; with mask_weight 'token' the
             token's own ratio there
    Source:  truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
             RL training"; 'mask' by token: icepop, Ling team 2025
    Others:  TIS is verl's rollout_is and TRL's token_truncate; OpenRLHF's low bound of tis truncates from below too.
             OpenRLHF's seq-mask-tis is 'mask' at the level 'geometric' with mask_weight 'token'
    """
    if kind not in ("truncate", "mask"):
        raise ValueError(f"unknown correction {kind!r}; the known ones are truncate, mask")
    ratio_T = log_ratios(logprobs_T, rollout_logprobs_T, responses, level).exp()
    if kind == "truncate":
        return Correction(ratio_T.clamp(max=high), ratio_T > high, ratio_T)
    outside_T = (ratio_T < low) | (ratio_T > high)
    own_T = (logprobs_T - rollout_logprobs_T).exp() if mask_weight == "token" else ratio_T
    return Correction(torch.where(outside_T, 0.0, own_T), outside_T, ratio_T)
