"""Loss of `dpo` on a micro-batch: log-probs of whole responses, the configured loss of each pair, and its metrics.

Legend: B rows and S columns of a micro-batch, H hidden; T tokens of its sequences end to end; K sequences of a
micro-batch, chosen and rejected in turn; N sequences of all samples; P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algo import preference
from megarlhf.algo.segments import Segments
from megarlhf.config import DPOConfig
from megarlhf.models.role import Role
from megarlhf.parallel.loss import LossOutput
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout
from megarlhf.parallel.vocab import Vocabulary, batch_logprobs

REFERENCE = "reference_logprob"
"""Column: log-prob of the whole response under the reference, repeated at each of its tokens."""


@dataclass(frozen=True)
class PreferenceLoss:
    """The configured loss on pairs; denominator: pairs of the mini-batch. Reports sums over pairs.

    Log-probs are added up in fp64, because a margin is a small difference of large sums.
    """

    cfg: DPOConfig
    vocabulary: Vocabulary
    denominator: int
    chosen_tokens: int
    """Tokens of the mini-batch's chosen responses."""
    kl_point: float = 0.0
    """Reference point of `kto`, for the whole mini-batch."""
    names: tuple[str, ...] = (
        "sft_loss",
        "correct",
        "chosen_reward",
        "rejected_reward",
        "chosen_logprob",
        "rejected_logprob",
    )

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> LossOutput:
        layout = batch.layout
        assert layout is not None
        logprobs_BS = response_logprobs(self.vocabulary, hidden_SBH, batch)
        if not layout.sequences:  # a filler micro-batch: the sum of zeros has zero gradients
            return LossOutput(logprobs_BS.sum(), torch.zeros(len(self.names), device=logprobs_BS.device))
        sums_K = sequence_sums(layout, logprobs_BS)
        tokens_K = sequence_sums(layout, batch.columns["response_mask"])
        loss_P, rewards_K = self._loss_and_rewards(sums_K, tokens_K, batch)
        nll = self._nll(sums_K[0::2], tokens_K[0::2])
        loss = loss_P.sum() / self.denominator
        if self.cfg.sft_weight > 0:
            loss = loss + self.cfg.sft_weight * nll
        with torch.no_grad():
            chosen_P, rejected_P = rewards_K[0::2], rewards_K[1::2]
            correct = (chosen_P > rejected_P).sum().double()
            sums = [nll, correct, chosen_P.sum(), rejected_P.sum(), sums_K[0::2].sum(), sums_K[1::2].sum()]
        return LossOutput(loss.float(), torch.stack(sums))

    def _loss_and_rewards(self, sums_K: Tensor, tokens_K: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Loss of each pair without the likelihood term, [P], and the implicit reward of each response, [K]."""
        cfg, beta = self.cfg, self.cfg.scale
        if cfg.loss in ("simpo", "orpo"):
            means_K = sums_K / tokens_K
            chosen_P, rejected_P = means_K[0::2], means_K[1::2]
            if cfg.loss == "orpo":
                return beta * preference.orpo(chosen_P, rejected_P), beta * means_K
            smoothing, margin = cfg.label_smoothing, cfg.simpo_margin
            loss_P = preference.simpo(chosen_P, rejected_P, beta=beta, margin=margin, label_smoothing=smoothing)
            return loss_P, beta * means_K
        assert batch.layout is not None
        ends_K = batch.layout.ends_K.to(sums_K.device)  # the column is constant over a response
        ratio_K = sums_K - batch.columns[REFERENCE].flatten()[ends_K]
        if cfg.ipo_length_normalised:
            ratio_K = ratio_K / tokens_K
        chosen_P, rejected_P = ratio_K[0::2], ratio_K[1::2]
        if cfg.loss == "dpo":
            loss_P = preference.dpo(chosen_P - rejected_P, beta=beta, label_smoothing=cfg.label_smoothing)
        elif cfg.loss == "ipo":
            loss_P = preference.ipo(chosen_P - rejected_P, beta=beta)
        else:
            loss_P = preference.kto(
                chosen_P,
                rejected_P,
                beta=beta,
                point=self.kl_point,
                desirable_weight=cfg.kto_desirable_weight,
                undesirable_weight=cfg.kto_undesirable_weight,
            )
        return loss_P, beta * ratio_K

    def _nll(self, chosen_sums_P: Tensor, chosen_tokens_P: Tensor) -> Tensor:
        """This micro-batch's part of the mini-batch's mean negative log-likelihood of chosen responses."""
        if self.cfg.sft_average == "token":
            return -chosen_sums_P.sum() / self.chosen_tokens
        return -(chosen_sums_P / chosen_tokens_P).sum() / self.denominator


def response_logprobs(vocabulary: Vocabulary, hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
    """Log-probs of the response tokens, [B, S]; 0 elsewhere."""
    return batch_logprobs(vocabulary, hidden_SBH, batch, batch.columns["response_mask"], return_entropy=False)[0]


def response_totals(role: Role, rounds: Iterable[Sequence[MicroBatch]], num_sequences: int) -> Tensor:
    """Log-prob of the whole response of each sequence under a role, [N] fp64, equal on every rank and, up to rounding,
    in every layout. No gradient. Collective."""
    vocabulary = role.shard.vocabulary()
    total_N = torch.zeros(num_sequences, dtype=torch.float64, device=role.mesh.runtime.device)

    def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.layout is not None
        sums_K = sequence_sums(batch.layout, response_logprobs(vocabulary, hidden_SBH, batch))
        if role.mesh.owns_outputs:
            total_N[batch.layout.sequences_K.to(total_N.device)] = sums_K
        return sums_K

    for batches in rounds:
        role.forward(batches, score)
    dist.all_reduce(total_N)
    return total_N


def sequence_sums(layout: MicroBatchLayout, grid_BS: Tensor) -> Tensor:
    """Sum over each sequence in the order of its tokens, [K] fp64. It does not depend on layout and micro-batch."""
    lengths_K = torch.tensor(layout.lengths, dtype=torch.int64)
    values_T = grid_BS.flatten()[layout.tokens_R.to(grid_BS.device)]
    return Segments(lengths_K.to(grid_BS.device), sum(layout.lengths)).sums(values_T.double())
