"""Preference optimisation: the actor learns from pairs of responses directly, without a reward model.

A sample is a pair: two sequences of a micro-batch, the chosen one before the rejected one. Before each step the frozen
reference says how likely it finds both; that is a forward of the reference for each training step, about a third of
the step's work, and needs no pass over all data before the first.

Legend: B rows and S columns of a micro-batch, H hidden; K sequences of a micro-batch, P pairs, N sequences of all
samples at hand, two of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algo import preference
from megarlhf.config import DPOConfig
from megarlhf.data.sample_types import PAIR_SEQUENCES, PairSample
from megarlhf.data.samples.dataset import lengths_of
from megarlhf.data.samples.limits import require_budget, require_positions
from megarlhf.models.role import Role, build_role
from megarlhf.models.weights import CHECKPOINTS, WeightSource
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import (
    MicroBatch,
    MicroBatchLayout,
    TokenSpans,
    micro_batch_mask,
    repeat_on_micro_batch,
)
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.supervised.dpo_loss import REFERENCE, PreferenceLoss, response_logprobs, sequence_sums
from megarlhf.trainers.supervised.loop import rounds, run_supervised
from megarlhf.trainers.supervised.objective import Metrics, Objective, ShouldStop


def run(cfg: DPOConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Train the actor on preference pairs."""
    run_supervised(PreferenceOptimisation(cfg), runtime, parts)


@dataclass(frozen=True)
class ScoredPair(PairSample):
    """With what is known of a pair before its loss."""

    reference: tuple[float, float] = field(kw_only=True)
    """Log-probs of the chosen and of the rejected response under the reference, in nats."""
    mismatched: tuple[float, float] | None = None
    """For `kto`: log-ratios of policy and reference for the responses of the next pair to this prompt."""


class PreferenceOptimisation(Objective[PairSample]):
    """The actor learns to prefer the chosen response."""

    command, role_name, head = "dpo", "actor", "lm"
    sample_type, sequence_fields = PairSample, PAIR_SEQUENCES
    sample_words = "prompt and response, chosen and rejected together: a pair stays in one micro-batch"

    def __init__(self, cfg: DPOConfig) -> None:
        super().__init__(cfg, cfg.actor)
        self.dpo = cfg
        self._reference: Role | None = None

    def sequences(self, sample: PairSample) -> list[list[int]]:
        """Both with the prompt, the chosen one first."""
        return [sample.prompt_tokens + response for response in (sample.chosen_tokens, sample.rejected_tokens)]

    def shared_length(self, sample: PairSample) -> int:
        return len(sample.prompt_tokens)

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
        """The reference, where the loss reads one."""
        if not self.dpo.needs_reference:
            return []
        if self.dpo.reference_is_base:
            self._reference = trained.without_adapter("reference")
            return [self._reference]
        section = self.dpo.roles()["reference"]
        seed = self.cfg.run.seed
        self._reference = build_role(
            "reference", section, "lm", cache, seed=seed, weights=weights, device_memory=device_memory
        )
        return [self._reference]

    def require_fitting(self, samples: Sequence[PairSample], max_positions: int, source: str) -> None:
        """The pairs, and for `kto` every prompt with the responses of any other pair."""
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
        words = "the longest prompt twice, with the responses of another pair, as loss = 'kto' reads them"
        require_positions(
            prompt + int(max(map(np.max, responses_2N))), max_positions, f"loss = 'kto': {self.section.model.path}"
        )
        require_budget(2 * prompt + sum(responses_2N), self.cfg.train.max_tokens_per_micro_batch, source, words)

    @property
    def scores(self) -> bool:
        return self.dpo.needs_reference

    def scored(self, role: Role, samples: Sequence[PairSample], should_stop: ShouldStop = None) -> Sequence[PairSample]:
        """With the reference's log-probs, and for `kto` the log-ratios that its reference point is made of."""
        if self._reference is None:
            return samples
        reference_N = self.logprobs(self._reference, samples, should_stop)
        scored = [
            ScoredPair(each.prompt_tokens, each.chosen_tokens, each.rejected_tokens, reference=(chosen, rejected))
            for each, (chosen, rejected) in zip(samples, reference_N.view(-1, 2).tolist(), strict=True)
        ]
        if self.dpo.loss != "kto":
            return scored
        others = mismatched(samples)
        ratio_N = self.logprobs(role, others, should_stop) - self.logprobs(self._reference, others, should_stop)
        ratios = ratio_N.view(-1, 2).tolist()
        return [replace(each, mismatched=(first, second)) for each, (first, second) in zip(scored, ratios, strict=True)]

    def logprobs(self, role: Role, samples: Sequence[PairSample], should_stop: ShouldStop) -> Tensor:
        """Log-probs of every response under a role, [N] fp64 on the CPU, the same on every rank; chosen and rejected in
        turn. No gradient. Collective. Raises: see `supervised.validation_sums`."""
        vocabulary = role.shard.vocabulary()
        total_N = torch.zeros(2 * len(samples), dtype=torch.float64, device=role.mesh.runtime.device)

        def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
            assert batch.layout is not None
            sums_K = sequence_sums(batch.layout, response_logprobs(vocabulary, hidden_SBH, batch))
            if role.mesh.owns_outputs:
                total_N[batch.layout.sequences_K.to(total_N.device)] = sums_K
            return sums_K

        for batches in rounds(self.micro_batches(role, samples), role, should_stop):
            role.forward(batches, score)
        dist.all_reduce(total_N)
        return total_N.cpu()

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
            kl_point=point_of(samples) if self.dpo.loss == "kto" else 0.0,
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
            metrics["kl_point"] = point_of(samples)
        return metrics

    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[PairSample]) -> Metrics:
        """The same of held-out pairs, and their loss."""
        metrics = {"loss": sums["loss"], **self.training_metrics(sums, samples)}
        return {f"eval_{name}": value for name, value in metrics.items()}


def mismatched(samples: Sequence[PairSample]) -> list[PairSample]:
    """Each prompt with the responses of the next pair, the last one with those of the first."""
    following = [*samples[1:], samples[0]]
    return [
        PairSample(each.prompt_tokens, other.chosen_tokens, other.rejected_tokens)
        for each, other in zip(samples, following, strict=True)
    ]


def point_of(samples: Sequence[PairSample]) -> float:
    """KTO's reference point of samples that are `scored`."""
    ratios = [each.mismatched for each in samples if isinstance(each, ScoredPair) and each.mismatched is not None]
    assert len(ratios) == len(samples), "samples without log-ratios of mismatched responses"
    return float(preference.kl_point(torch.tensor(ratios, dtype=torch.float64)))
