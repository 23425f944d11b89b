"""Losses of the policy and the critic on a micro-batch, from the model's output.

Both read the column `loss_weights`, the weight of each response token in the mini-batch. It is made for the whole
mini-batch before that is cut into micro-batches (`experience.batches.loss_weights`).

Legend: B rows, S positions, H hidden, T response tokens of the micro-batch end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarlhf.algo.kl import kl_estimate, ratio_weighted
from megarlhf.algo.losses import clipped_value_loss
from megarlhf.algo.policy import Bounds, log_ratios, policy_loss
from megarlhf.algo.segments import Segments
from megarlhf.config import AlgoConfig
from megarlhf.own_code.policy_terms import estimator_of, ratio_of, surrogate_of, token_weights_of
from megarlhf.parallel.loss import LossOutput
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.vocab import Vocabulary, batch_logprobs
from megarlhf.trainers.rl.logprob_gap import correction_of


class ResponseTokens:
    """Response tokens of a micro-batch, end to end. The losses see no other tokens."""

    def __init__(self, batch: MicroBatch) -> None:
        self._columns = batch.columns
        self._positions_T = batch.columns["response_mask"].flatten().nonzero().flatten()
        samples_T = batch.columns["sample_numbers"].flatten()[self._positions_T]
        _, lengths_K = torch.unique_consecutive(samples_T, return_counts=True)
        self.responses = Segments(lengths_K, len(self._positions_T))

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Tensor:
        """A column of the micro-batch, [T]."""
        return self.select(self._columns[name])

    def select(self, grid_BS: Tensor) -> Tensor:
        """Values of a grid at the response tokens, [B, S] -> [T]. Gradients flow."""
        return grid_BS.flatten()[self._positions_T]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Surrogate + KL in the loss - entropy bonus."""

    algo: AlgoConfig
    temperature: float
    vocabulary: Vocabulary
    response_tokens: int
    """Response tokens of the mini-batch."""
    kl_coef: float = 0.0
    """Coefficient of the KL in the loss."""
    entropy_coef: float = 0.0
    ptx_coef: float = 0.0
    """Coefficient of the pretraining mix, whose tokens have the column `ptx_weights`."""
    captures_logprobs: bool = False
    """Whether the log-probs of this forward are returned, [B, S], to become the column `old_logprobs`. This forward is
    then the first of the step, and its ratio is 1."""
    corrects_all: bool = False
    """Whether KL and entropy get the weights of the rollout correction too, because older weights drew samples."""

    @property
    def per(self) -> Mapping[str, float]:
        """Divisor that makes each sum a metric. The trainer adds up `loss`, the first of them."""
        per_token = dict.fromkeys(("clip_fraction", "entropy", "ratio_deviation", "policy_kl"), self.response_tokens)
        return {"loss": 1, "policy_loss": 1, **per_token, **({"ptx_loss": 1} if self.ptx_coef > 0 else {})}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.per)[1:]

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> LossOutput:
        logprobs_BS, entropy_BS = batch_logprobs(
            self.vocabulary, hidden_SBH, batch, batch.columns["response_mask"], temperature=self.temperature
        )
        tokens = ResponseTokens(batch)
        logprobs_T, entropy_T = tokens.select(logprobs_BS), tokens.select(entropy_BS)
        weights_T = tokens["loss_weights"].to(logprobs_T)
        old_T = tokens["old_logprobs"] if "old_logprobs" in tokens else logprobs_T.detach()
        corrected_T = self._corrected(weights_T, tokens, old_T)
        ratio = ratio_of(self.algo.ratio)
        policy = policy_loss(
            logprobs_T,
            old_T,
            tokens["advantages"],
            self._token_weights(logprobs_T, old_T, tokens, corrected_T),
            tokens.responses,
            surrogate=surrogate_of(self.algo.policy_loss),
            ratio=ratio,
            bounds=bounds_of(self.algo),
        )
        loss, others_T = policy.loss, corrected_T if self.corrects_all else weights_T
        if self.kl_coef > 0:
            kl = self.algo.kl
            kl_T = kl_estimate(logprobs_T, tokens["ref_logprobs"], estimator_of(kl.estimator), kl.clamp)
            if kl.ratio_weighted:
                kl_T = ratio_weighted(kl_T, log_ratios(logprobs_T, old_T, tokens.responses, ratio))
            loss = loss + self.kl_coef * (kl_T * others_T).sum()
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * (entropy_T * others_T).sum()
        sums = [policy.loss, policy.clipped, entropy_T.sum(), policy.ratio_deviation, policy.policy_kl]
        if self.ptx_coef > 0:
            sums.append(self._ptx(hidden_SBH, batch))
            loss = loss + self.ptx_coef * sums[-1]
        totals = torch.stack([value.detach().double() for value in sums])
        return LossOutput(loss, totals, logprobs_BS.detach() if self.captures_logprobs else None)

    def _corrected(self, weights_T: Tensor, tokens: ResponseTokens, old_T: Tensor) -> Tensor:
        """Weights times the rollout correction. It is a column, or is computed here together with the old log-probs."""
        if "rollout_weights" in tokens:
            return weights_T * tokens["rollout_weights"]
        if "rollout_logprobs" in tokens:
            cfg = self.algo.rollout_correction
            return weights_T * correction_of(cfg, old_T, tokens["rollout_logprobs"], tokens.responses).weights_T
        return weights_T

    def _token_weights(self, logprobs_T: Tensor, old_T: Tensor, tokens: ResponseTokens, weights_T: Tensor) -> Tensor:
        """Weights times those of the user's own function, if one is configured."""
        if self.algo.token_weights is None:
            return weights_T
        function = token_weights_of(self.algo.token_weights)
        return weights_T * function(logprobs_T, old_T, tokens["advantages"], tokens.responses)

    def _ptx(self, hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        """This micro-batch's part of the mean next-token loss of the update's texts."""
        weights_BS = batch.columns["ptx_weights"]
        logprobs_BS, _ = batch_logprobs(self.vocabulary, hidden_SBH, batch, weights_BS > 0, return_entropy=False)
        return -(logprobs_BS * weights_BS.to(logprobs_BS)).sum()


def bounds_of(algo: AlgoConfig) -> Bounds:
    """Bounds and temperatures of the surrogate, from the configuration."""
    return Bounds(
        low=algo.clip_low,
        high=algo.clip_high,
        dual=algo.clip_dual,
        delta=algo.clip_delta,
        temperature_positive=algo.sapo_temperature_positive,
        temperature_negative=algo.sapo_temperature_negative,
    )


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Clipped squared error of the critic; denominator: response tokens of the mini-batch."""

    clip: float | None
    response_tokens: int
    """Response tokens of the mini-batch."""

    @property
    def per(self) -> Mapping[str, float]:
        """Divisor that makes each sum a metric."""
        return {"value_loss": 1, "value_clip_fraction": self.response_tokens}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.per)

    def __call__(self, values_BS1: Tensor, batch: MicroBatch) -> LossOutput:
        tokens = ResponseTokens(batch)
        values_T = tokens.select(batch.before(values_BS1[..., 0]))
        weights_T = tokens["loss_weights"].to(values_T)
        result = clipped_value_loss(values_T, tokens["values"], tokens["returns"], weights_T, clip=self.clip)
        return LossOutput(result.loss, torch.stack([value.detach().double() for value in result]))
