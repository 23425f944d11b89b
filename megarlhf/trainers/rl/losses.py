"""The policy's and the critic's loss on a micro-batch: from model output to `algo/`.

Both read the column `loss_weights`: how much each response token counts in the mini-batch, which is made for all of it
before it is cut into micro-batches (`experience.batches.loss_weights`).

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
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.step import LossOutput
from megarlhf.parallel.vocab import Vocabulary, batch_logprobs
from megarlhf.trainers.rl.logprob_gap import correction_of


class ResponseTokens:
    """The response tokens of a micro-batch, end to end: the losses see nothing else."""

    def __init__(self, batch: MicroBatch) -> None:
        self._columns = batch.columns
        self._at_T = batch.columns["response_mask"].flatten().nonzero().flatten()
        samples_T = batch.columns["sample_numbers"].flatten()[self._at_T]
        _, lengths_K = torch.unique_consecutive(samples_T, return_counts=True)
        self.responses = Segments(lengths_K, len(self._at_T))

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Tensor:
        """A column of the micro-batch, [T]."""
        return self.of(self._columns[name])

    def of(self, grid_BS: Tensor) -> Tensor:
        """[B, S] -> [T]. Gradients flow."""
        return grid_BS.flatten()[self._at_T]


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
    """Whether log-probs of this forward are returned, [B, S]. So it is where there is no column `old_logprobs`: this
    forward is then the first at the weights that drew the samples, and the ratio is 1."""

    @property
    def per(self) -> Mapping[str, float]:
        """Divisor of each sum that makes it a metric; `loss`, which the trainer adds up, is one of them."""
        of_tokens = dict.fromkeys(("clip_fraction", "entropy", "ratio_deviation", "policy_kl"), self.response_tokens)
        return {"loss": 1, "policy_loss": 1, **of_tokens, **({"ptx_loss": 1} if self.ptx_coef > 0 else {})}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.per)[1:]

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> LossOutput:
        logprobs_BS, entropy_BS = batch_logprobs(
            self.vocabulary, hidden_SBH, batch, batch.columns["response_mask"], temperature=self.temperature
        )
        tokens = ResponseTokens(batch)
        logprobs_T, entropy_T = tokens.of(logprobs_BS), tokens.of(entropy_BS)
        weights_T = tokens["loss_weights"].to(logprobs_T)
        old_T = tokens["old_logprobs"] if "old_logprobs" in tokens else logprobs_T.detach()
        policy = policy_loss(
            logprobs_T,
            old_T,
            tokens["advantages"],
            self._corrected(weights_T, tokens, old_T),
            tokens.responses,
            surrogate=self.algo.policy_loss,
            ratio=self.algo.ratio,
            bounds=bounds_of(self.algo),
        )
        loss = policy.loss
        if self.kl_coef > 0:
            kl = self.algo.kl
            kl_T = kl_estimate(logprobs_T, tokens["ref_logprobs"], kl.estimator, kl.clamp)
            if kl.ratio_weighted:
                kl_T = ratio_weighted(kl_T, log_ratios(logprobs_T, old_T, tokens.responses, self.algo.ratio))
            loss = loss + self.kl_coef * (kl_T * weights_T).sum()
        if self.entropy_coef > 0:
            loss = loss - self.entropy_coef * (entropy_T * weights_T).sum()
        sums = [policy.loss, policy.clipped, entropy_T.sum(), policy.ratio_deviation, policy.policy_kl]
        if self.ptx_coef > 0:
            sums.append(self._ptx(hidden_SBH, batch))
            loss = loss + self.ptx_coef * sums[-1]
        totals = torch.stack([value.detach().double() for value in sums])
        return LossOutput(loss, totals, logprobs_BS.detach() if self.captures_logprobs else None)

    def _corrected(self, weights_T: Tensor, tokens: ResponseTokens, old_T: Tensor) -> Tensor:
        """The weights, times what corrects for the rollout's numerics: made before, or here where old log-probs are."""
        if "rollout_weights" in tokens:
            return weights_T * tokens["rollout_weights"]
        if "rollout_logprobs" in tokens:
            found = correction_of(self.algo.rollout_correction, old_T, tokens["rollout_logprobs"], tokens.responses)
            return weights_T * found.weights_T
        return weights_T

    def _ptx(self, hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        """The mean next-token loss of the update's texts, as far as they are in this micro-batch."""
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
    """Clipped squared error of the critic, its mean over the response tokens of the mini-batch."""

    clip: float | None
    response_tokens: int
    """Response tokens of the mini-batch."""

    @property
    def per(self) -> Mapping[str, float]:
        """Divisor of each sum that makes it a metric."""
        return {"value_loss": 1, "value_clip_fraction": self.response_tokens}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.per)

    def __call__(self, values_BS1: Tensor, batch: MicroBatch) -> LossOutput:
        tokens = ResponseTokens(batch)
        values_T = tokens.of(batch.before(values_BS1[..., 0]))
        weights_T = tokens["loss_weights"].to(values_T)
        result = clipped_value_loss(values_T, tokens["values"], tokens["returns"], weights_T, clip=self.clip)
        return LossOutput(result.loss, torch.stack([value.detach().double() for value in result]))
