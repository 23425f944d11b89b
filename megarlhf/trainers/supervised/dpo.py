"""Preference optimisation: the actor learns from pairs of responses directly, without a reward model.

A sample is a pair: two sequences of a micro-batch, the chosen one before the rejected one. The frozen reference
computes their log-probs before each step. This is about a third of the step's work, and saves a pass over all data
before the first step.

Legend: B rows and S columns of a micro-batch, H hidden; K sequences of a micro-batch, P pairs, N sequences of all
given samples, two for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megarlhf.algo import preference
from megarlhf.config import DPOConfig
from megarlhf.data.sample_types import PairSample
from megarlhf.data.samples.dataset import lengths_of
from megarlhf.data.samples.limits import require_budget, require_positions
from megarlhf.models.role import Role, build_role
from megarlhf.models.weights import CHECKPOINTS, WeightSource
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import (
    MicroBatchLayout,
    TokenSpans,
    micro_batch_mask,
    repeat_on_micro_batch,
)
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.supervised.dpo_loss import REFERENCE, PreferenceLoss, response_totals
from megarlhf.trainers.supervised.loop import rounds, run_supervised
from megarlhf.trainers.supervised.objective import Metrics, PairObjective, ShouldStop


def run(cfg: DPOConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Train the actor on preference pairs."""
    run_supervised(PreferenceOptimisation(cfg), runtime, parts)


@dataclass(frozen=True)
class ScoredPair(PairSample):
    """A pair with the log-probs that its loss needs."""

    reference: tuple[float, float] = field(kw_only=True)
    """Log-probs of the chosen and of the rejected response under the reference, in nats."""
    mismatched: tuple[float, float] | None = None
    """For `kto`: log-ratios of policy and reference for the responses of the next pair to this prompt."""


class PreferenceOptimisation(PairObjective):
    """The actor learns to prefer the chosen response."""

    command, role_name, head = "dpo", "actor", "lm"

    def __init__(self, cfg: DPOConfig) -> None:
        super().__init__(cfg, cfg.actor)
        self.dpo = cfg
        self._reference: Role | None = None

    @property
    def has_frozen(self) -> bool:
        return self.dpo.needs_reference and not self.dpo.reference_is_base

    def build_frozen(
        self,
        cache: GroupCache,
        trained: Role,
        weights: WeightSource = CHECKPOINTS,
        device_memory: DeviceMemory | None = None,
    ) -> list[Role]:
        """Build the reference, if the loss reads one."""
        if not self.dpo.needs_reference:
            return []
        if self.dpo.reference_is_base:
            self._reference = trained.without_adapter("reference")
            return [self._reference]
        section, seed = self.dpo.roles()["reference"], self.cfg.run.seed
        self._reference = build_role(
            "reference", section, "lm", cache, seed=seed, weights=weights, device_memory=device_memory
        )
        return [self._reference]

    def require_fitting(self, samples: Sequence[PairSample], max_positions: int, source: str) -> None:
        """Check the pairs, and for `kto` every prompt with the responses of any other pair."""
        super().require_fitting(samples, max_positions, source)
        if self.dpo.loss != "kto":
            return
        if len(samples) < 2:
            raise ValueError(
                f"{source} has one usable pair, and loss = 'kto' measures its reference point on each prompt with the "
                "responses of another pair; give more pairs, or another loss"
            )
        prompt = int(lengths_of(samples, "prompt_tokens").max())
        responses_2N = [lengths_of(samples, name) for name in ("chosen_tokens", "rejected_tokens")]
        parts = "the longest prompt twice, with the responses of another pair, as loss = 'kto' reads them"
        require_positions(
            prompt + int(max(map(np.max, responses_2N))), max_positions, f"loss = 'kto': {self.section.model.path}"
        )
        require_budget(2 * prompt + sum(responses_2N), self.cfg.train.max_tokens_per_micro_batch, source, parts)

    @property
    def scores(self) -> bool:
        return self.dpo.needs_reference

    def scored(self, role: Role, samples: Sequence[PairSample], should_stop: ShouldStop = None) -> Sequence[PairSample]:
        """Add the reference's log-probs, and for `kto` the log-ratios of its reference point."""
        if self._reference is None:
            return samples
        reference_N = self.logprobs(self._reference, samples, should_stop)
        scored = [
            ScoredPair(pair.prompt_tokens, pair.chosen_tokens, pair.rejected_tokens, reference=(chosen, rejected))
            for pair, (chosen, rejected) in zip(samples, reference_N.view(-1, 2).tolist(), strict=True)
        ]
        if self.dpo.loss != "kto":
            return scored
        others = mismatched(samples)
        ratio_N = self.logprobs(role, others, should_stop) - self.logprobs(self._reference, others, should_stop)
        ratios = ratio_N.view(-1, 2).tolist()
        return [replace(pair, mismatched=(first, second)) for pair, (first, second) in zip(scored, ratios, strict=True)]

    def logprobs(self, role: Role, samples: Sequence[PairSample], should_stop: ShouldStop) -> Tensor:
        """Log-probs of every response under a role, chosen and rejected in turn: [N] fp64 on the CPU, equal on every
        rank, without gradient. Collective. Raises: see `validation_sums`."""
        batches = self.micro_batches(role, samples)
        return response_totals(role, rounds(batches, role, should_stop), 2 * len(samples)).cpu()

    def columns(
        self, samples: Sequence[PairSample], layout: MicroBatchLayout, device: torch.device
    ) -> dict[str, Tensor]:
        lengths_N = torch.tensor([len(tokens) for sample in samples for tokens in self.sequences(sample)])
        prompts_N = torch.tensor([len(sample.prompt_tokens) for sample in samples]).repeat_interleave(2)
        responses = TokenSpans.responses(prompts_N, lengths_N - prompts_N)
        columns = {"response_mask": micro_batch_mask(layout, responses, device)}
        reference = [logprob for sample in samples if isinstance(sample, ScoredPair) for logprob in sample.reference]
        if reference:
            reference_N = torch.tensor(reference, dtype=torch.float64)
            columns[REFERENCE] = repeat_on_micro_batch(layout, reference_N, responses, device)
        return columns

    def training_loss(self, role: Role, samples: Sequence[PairSample]) -> PreferenceLoss:
        return PreferenceLoss(
            cfg=self.dpo,
            vocabulary=role.shard.vocabulary(),
            denominator=len(samples),
            chosen_tokens=sum(len(sample.chosen_tokens) for sample in samples),
            kl_point=kl_point_of(samples) if self.dpo.loss == "kto" else 0.0,
        )

    def training_metrics(self, sums: Mapping[str, float], samples: Sequence[PairSample]) -> Metrics:
        """Means over pairs."""
        num_pairs = len(samples)
        metrics: Metrics = {
            "pair_accuracy": sums["correct"] / num_pairs,
            "chosen_reward": sums["chosen_reward"] / num_pairs,
            "rejected_reward": sums["rejected_reward"] / num_pairs,
            "reward_margin": (sums["chosen_reward"] - sums["rejected_reward"]) / num_pairs,
            "chosen_logprob": sums["chosen_logprob"] / num_pairs,
            "rejected_logprob": sums["rejected_logprob"] / num_pairs,
        }
        if self.dpo.sft_weight > 0:
            metrics["sft_loss"] = sums["sft_loss"]
        if self.dpo.loss == "kto":
            metrics["kl_point"] = kl_point_of(samples)
        return metrics

    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[PairSample]) -> Metrics:
        """Loss and the metrics of training, of held-out pairs."""
        metrics = {"loss": sums["loss"], **self.training_metrics(sums, samples)}
        return {f"eval_{name}": value for name, value in metrics.items()}


def mismatched(samples: Sequence[PairSample]) -> list[PairSample]:
    """Pairs of each prompt with the responses of the next pair; the last prompt gets the first pair's."""
    following = [*samples[1:], samples[0]]
    return [
        PairSample(pair.prompt_tokens, other.chosen_tokens, other.rejected_tokens)
        for pair, other in zip(samples, following, strict=True)
    ]


def kl_point_of(samples: Sequence[PairSample]) -> float:
    """KTO's reference point of scored samples."""
    ratios = [pair.mismatched for pair in samples if isinstance(pair, ScoredPair) and pair.mismatched is not None]
    assert len(ratios) == len(samples), "samples without log-ratios of mismatched responses"
    return float(preference.kl_point(torch.tensor(ratios, dtype=torch.float64)))
