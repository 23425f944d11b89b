"""Supervised fine-tuning: maximises the likelihood of responses, given their prompts.

Legend: B rows of a micro-batch, S positions, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarlhf.algo.losses import token_nll
from megarlhf.columns import Ragged
from megarlhf.config import SFTConfig
from megarlhf.data.samples.encoders import SFTSample
from megarlhf.models.role import Role
from megarlhf.parallel.loss import LossOutput
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout, TokenSpans, scatter_to_micro_batch
from megarlhf.parallel.vocab import Vocabulary, batch_logprobs
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.supervised.loop import run_supervised
from megarlhf.trainers.supervised.objective import Metrics, Objective


def run(cfg: SFTConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Train the actor on prompt-response pairs."""
    run_supervised(SupervisedFineTuning(cfg), runtime, parts)


@dataclass(frozen=True)
class NextTokenLoss:
    """Negative log-likelihood; denominator: learnt tokens of the mini-batch."""

    denominator: int
    vocabulary: Vocabulary
    names: tuple[str, ...] = ()

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> LossOutput:
        mask_BS = batch.columns["response_mask"]
        logprobs_BS, _ = batch_logprobs(self.vocabulary, hidden_SBH, batch, mask_BS, return_entropy=False)
        loss = token_nll(logprobs_BS, mask_BS, denominator=self.denominator)
        return LossOutput(loss, loss.new_zeros(0))


class SupervisedFineTuning(Objective[SFTSample]):
    """The actor learns responses."""

    command, role_name, head = "sft", "actor", "lm"
    sample_type, sequence_fields = SFTSample, (("tokens",),)
    sample_words = "prompt and response"

    def __init__(self, cfg: SFTConfig) -> None:
        super().__init__(cfg, cfg.actor)

    def sequences(self, sample: SFTSample) -> list[list[int]]:
        return [sample.tokens]

    def training_loss(self, role: Role, samples: Sequence[SFTSample]) -> NextTokenLoss:
        learnt = sum(sample.num_learnt for sample in samples)
        return NextTokenLoss(denominator=learnt, vocabulary=role.shard.vocabulary())

    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[SFTSample]) -> Metrics:
        """Held-out loss (mean over response tokens, nats) and perplexity."""
        return {"eval_loss": sums["loss"], "eval_perplexity": math.exp(min(sums["loss"], 700.0))}

    def columns(
        self, samples: Sequence[SFTSample], layout: MicroBatchLayout, device: torch.device
    ) -> dict[str, Tensor]:
        # The first token is not predicted.
        rows = [torch.tensor(sample.learnt()[1:]) for sample in samples]
        learnt = Ragged.from_rows(rows, torch.bool)
        spans = TokenSpans.responses(torch.ones_like(learnt.lengths_N), learnt.lengths_N)
        return {"response_mask": scatter_to_micro_batch(layout, learnt, spans).to(device)}
