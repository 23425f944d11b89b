"""The policy's and the critic's loss on a micro-batch: from model output to `algo/`.

Legend: B rows, S positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.losses import clipped_policy_loss, clipped_value_loss, entropy_bonus, kl_penalty
from megarlhf.config import AlgoConfig
from megarlhf.parallel.step import MicroBatch
from megarlhf.parallel.vocab import Vocabulary, next_token_logprobs


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate + KL in the loss - entropy bonus.

    Denominator: response tokens of the mini-batch, or its sequences where `algo.loss_average` says so.
    """

    algo: AlgoConfig
    temperature: float
    response_tokens: int
    sequences: int
    vocabulary: Vocabulary
    names: tuple[str, ...] = ("policy_loss", "clipped", "entropy", "ratio_deviation")

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        mask_BS = batch.columns["response_mask"]
        old_BS = batch.columns["old_logprobs"]
        logprobs_BS, entropy_BS = next_token_logprobs(
            self.vocabulary, hidden_SBH, batch.tokens_BS, mask_BS, temperature=self.temperature
        )
        average = self.algo.loss_average
        over: dict[str, Any] = {
            "denominator": self.response_tokens if average == "token" else self.sequences,
            "aggregation": average,
            "lengths_BT": batch.columns["response_lengths"],
        }
        advantages_BS, low, high = batch.columns["advantages"], self.algo.clip_low, self.algo.clip_high
        policy = clipped_policy_loss(logprobs_BS, old_BS, advantages_BS, mask_BS, clip_low=low, clip_high=high, **over)
        loss = policy.loss
        if self.algo.kl.placement == "loss" and self.algo.kl.coef > 0:
            ref_BS, kind = batch.columns["ref_logprobs"], self.algo.kl.estimator
            loss = loss + self.algo.kl.coef * kl_penalty(logprobs_BS, ref_BS, mask_BS, kind=kind, **over)
        if self.algo.entropy_coef > 0:
            loss = loss - self.algo.entropy_coef * entropy_bonus(entropy_BS, mask_BS, **over)
        with torch.no_grad():
            deviation = ((logprobs_BS - old_BS).exp() - 1).abs()[mask_BS].sum()
            sums = [policy.loss, policy.clipped, entropy_BS[mask_BS].sum(), deviation]
            return loss, torch.stack([value.detach().double() for value in sums])


@dataclass(frozen=True)
class ValueLoss:
    """Clipped squared error of the critic. Denominator: response tokens of the mini-batch."""

    clip: float
    response_tokens: int
    names: tuple[str, ...] = ()

    def __call__(self, values_BS1: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        columns = batch.columns
        result = clipped_value_loss(
            values_BS1[..., 0],
            columns["values"],
            columns["returns"],
            columns["response_mask"],
            clip=self.clip,
            denominator=self.response_tokens,
        )
        return result.loss, result.loss.new_zeros(0)
