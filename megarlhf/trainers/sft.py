"""Supervised fine-tuning: the likelihood of responses, given their prompts.

Legend: B rows of a micro-batch, S positions, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.losses import token_nll
from megarlhf.config import SFTConfig
from megarlhf.data.samples import Records, SFTSample, Skipped, build_sft
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.models.role import Role
from megarlhf.parallel.batching import MicroBatchLayout, TokenSpans, micro_batch_mask
from megarlhf.parallel.step import MicroBatch
from megarlhf.parallel.vocab import Vocabulary, next_token_logprobs
from megarlhf.runtime import Runtime
from megarlhf.trainers.parts import Parts
from megarlhf.trainers.supervised import Metrics, Objective, run_supervised


def run(cfg: SFTConfig, runtime: Runtime, parts: Parts = Parts()) -> None:  # noqa: B008 -- frozen
    """Train the actor on prompt-response pairs."""
    run_supervised(SupervisedFineTuning(cfg), runtime, parts)


@dataclass(frozen=True)
class NextTokenLoss:
    """Negative log-likelihood; denominator: response tokens of the mini-batch."""

    denominator: int
    vocabulary: Vocabulary
    names: tuple[str, ...] = ()

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        mask_BS = batch.columns["response_mask"]
        logprobs_BS, _ = next_token_logprobs(
            self.vocabulary, hidden_SBH, batch.tokens_BS, mask_BS, share=batch.share, return_entropy=False
        )
        loss = token_nll(logprobs_BS, mask_BS, denominator=self.denominator)
        return loss, loss.new_zeros(0)


class SupervisedFineTuning(Objective[SFTSample]):
    """The actor learns responses."""

    command, role_name, head = "sft", "actor", "lm"
    sample_words = "prompt and response"

    def __init__(self, cfg: SFTConfig) -> None:
        super().__init__(cfg, cfg.actor)

    @property
    def fields(self) -> tuple[str, ...]:
        return ("prompt", "response") if self.cfg.data.template == "plain" else ("messages",)

    def build_samples(self, records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[SFTSample], Skipped]:
        return build_sft(records, tokenizer, **options)

    def sequences(self, sample: SFTSample) -> list[list[int]]:
        return [sample.tokens]

    def training_loss(self, role: Role, samples: Sequence[SFTSample]) -> NextTokenLoss:
        response_tokens = sum(len(sample.tokens) - sample.prompt_length for sample in samples)
        return NextTokenLoss(denominator=response_tokens, vocabulary=role.shard.vocabulary())

    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[SFTSample]) -> Metrics:
        """Held-out loss (mean over response tokens, nats) and perplexity."""
        return {"eval_loss": sums["loss"], "eval_perplexity": math.exp(min(sums["loss"], 700.0))}

    def columns(
        self, samples: Sequence[SFTSample], layout: MicroBatchLayout, device: torch.device
    ) -> dict[str, Tensor]:
        lengths_N = torch.tensor([len(sample.tokens) for sample in samples])
        prompts_N = torch.tensor([sample.prompt_length for sample in samples])
        responses = TokenSpans.predicting(prompts_N, lengths_N - prompts_N)
        return {"response_mask": micro_batch_mask(layout, responses, device)}
