"""The policy's and the critic's loss on a micro-batch: from model output to `algo/`.

Legend: B rows, S positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        denominator = self.response_tokens if average == "token" else self.sequences
        lengths_BS = batch.columns["response_lengths"]
        policy = clipped_policy_loss(
            logprobs_BS,
            old_BS,
            batch.columns["advantages"],
            mask_BS,
            clip_low=self.algo.clip_low,
            clip_high=self.algo.clip_high,
            denominator=denominator,
            aggregation=average,
            lengths_BT=lengths_BS,
        )
        loss = policy.loss
        if self.algo.kl.placement == "loss" and self.algo.kl.coef > 0:
            penalty = kl_penalty(
                logprobs_BS,
                batch.columns["ref_logprobs"],
                mask_BS,
                kind=self.algo.kl.estimator,
                denominator=denominator,
                aggregation=average,
                lengths_BT=lengths_BS,
            )
            loss = loss + self.algo.kl.coef * penalty
        if self.algo.entropy_coef > 0:
            bonus = entropy_bonus(
                entropy_BS, mask_BS, denominator=denominator, aggregation=average, lengths_BT=lengths_BS
            )
            loss = loss - self.algo.entropy_coef * bonus
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
