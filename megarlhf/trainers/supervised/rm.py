"""Reward model training: a scalar head learns which of two responses people prefer.

A sample is a pair: two sequences of a micro-batch, the chosen one before the rejected one.

Legend: B rows and S columns of a micro-batch, X = B x S; P pairs, K = 2 P sequences, L longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megarlhf.algo.calibration import pair_report
from megarlhf.algo.losses import centering, pairwise_aligned_span, pairwise_ranking
from megarlhf.architectures.hf_config import SCORE_OF
from megarlhf.columns import redistribute
from megarlhf.config import RMConfig
from megarlhf.data.sample_types import PairSample
from megarlhf.models.role import Role
from megarlhf.parallel.batching import owners_of_outputs
from megarlhf.parallel.chunks import split_name
from megarlhf.parallel.loss import LossOutput
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout, TokenSpans, repeat_on_micro_batch
from megarlhf.resume.claim.identity import digest_of_samples
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.sequence_scores import sequence_scores
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.supervised.loop import rounds, run_supervised, validation_sums
from megarlhf.trainers.supervised.objective import Metrics, PairObjective, ShouldStop


def run(cfg: RMConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Train the reward model on preference pairs."""
    run_supervised(RewardModelling(cfg), runtime, parts)


@dataclass(frozen=True)
class PairwiseLoss:
    """Ranking loss; denominator: pairs of the mini-batch. Reports sums over pairs."""

    kind: Literal["last_token", "response_mean", "aligned_span"]
    denominator: int
    center_coef: float = 0.0
    margin: bool = False
    """Whether the loss reads the column `margin`."""
    names: tuple[str, ...] = ("correct", "chosen_score", "rejected_score", "squared_score")

    def __call__(self, scores_BS1: Tensor, batch: MicroBatch) -> LossOutput:
        assert batch.layout is not None
        scores_X = scores_BS1.flatten()
        scores_K = scores_of_pairs(scores_BS1, batch)
        chosen_P, rejected_P = scores_K[0::2], scores_K[1::2]
        if self.kind != "aligned_span":
            margin_P = None
            if self.margin:
                margin_X = batch.columns["margin"].flatten().to(scores_X)
                margin_P = margin_X[batch.layout.ends_K.to(scores_X.device)][0::2]
            loss = pairwise_ranking(chosen_P, rejected_P, denominator=self.denominator, margin_N=margin_P)
        else:
            loss = self._aligned_span(scores_X, batch.tokens_BS.flatten(), batch.layout)
        if self.center_coef > 0:
            loss = loss + self.center_coef * centering(chosen_P, rejected_P, denominator=self.denominator)
        with torch.no_grad():
            correct = (chosen_P > rejected_P).sum().to(scores_X.dtype)
            squares = chosen_P.square().sum() + rejected_P.square().sum()
            return LossOutput(loss, torch.stack([correct, chosen_P.sum(), rejected_P.sum(), squares]))

    def _aligned_span(self, scores_X: Tensor, tokens_X: Tensor, layout: MicroBatchLayout) -> Tensor:
        """Loss on the scores of each sequence as a row, [P, L] for either side; the padding is not read."""
        lengths_K = torch.tensor(layout.lengths, dtype=torch.int64)
        steps_L = torch.arange(max(layout.lengths, default=1))
        firsts_K = lengths_K.cumsum(0) - lengths_K
        index_KL = layout.tokens_R[firsts_K[:, None] + torch.minimum(steps_L, lengths_K[:, None] - 1)]
        index_KL, lengths_K = index_KL.to(scores_X.device), lengths_K.to(scores_X.device)
        scores_KL, tokens_KL = scores_X[index_KL], tokens_X[index_KL]
        rows = [side[start::2] for side in (scores_KL, tokens_KL, lengths_K) for start in (0, 1)]
        return pairwise_aligned_span(*rows, denominator=self.denominator)


class RewardModelling(PairObjective):
    """The reward model learns to rank pairs."""

    command, role_name, head = "rm", "reward_model", "scalar"

    def __init__(self, cfg: RMConfig) -> None:
        super().__init__(cfg, cfg.reward_model)
        self.rm = cfg

    def other_digests(self, validation: Sequence[PairSample]) -> dict[str, str]:
        return (
            {"data.validation (measured by unit_variance)": digest_of_samples(validation)}
            if self.rm.unit_variance
            else {}
        )

    @property
    def config_overrides(self) -> Mapping[str, Any]:
        return {SCORE_OF: "response_mean" if self.rm.loss == "response_mean" else None}

    def training_loss(self, role: Role, samples: Sequence[PairSample]) -> PairwiseLoss:
        return PairwiseLoss(
            kind=self.rm.loss, denominator=len(samples), center_coef=self.rm.center_coef, margin=self.rm.margin
        )

    def columns(
        self, samples: Sequence[PairSample], layout: MicroBatchLayout, device: torch.device
    ) -> dict[str, Tensor]:
        """Columns with one number per sequence, at its last token."""
        numbers: dict[str, Tensor] = {}
        if self.rm.margin:
            numbers["margin"] = torch.tensor([sample.margin for sample in samples]).repeat_interleave(2)
        if self.rm.loss == "response_mean":
            sides = [(sample.chosen_tokens, sample.rejected_tokens) for sample in samples]
            numbers[_RESPONSE_LENGTH] = torch.tensor([len(tokens) for pair in sides for tokens in pair])
        if not numbers:
            return {}
        lengths_K = torch.tensor([length for sample in samples for length in self.sequence_lengths(sample)])
        spans = TokenSpans.last(lengths_K)
        return {name: repeat_on_micro_batch(layout, numbers_K, spans, device) for name, numbers_K in numbers.items()}

    def validation_loss(self, role: Role, samples: Sequence[PairSample]) -> PairwiseLoss:
        """The ranking loss without the term that centres scores."""
        return PairwiseLoss(kind=self.rm.loss, denominator=len(samples), margin=self.rm.margin)

    def training_metrics(self, sums: Mapping[str, float], samples: Sequence[PairSample]) -> Metrics:
        """Share of pairs that are ranked correctly."""
        return {"pair_accuracy": sums["correct"] / len(samples)}

    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[PairSample]) -> Metrics:
        """Held-out loss, share of pairs that are ranked correctly, and mean scores."""
        return {
            "eval_loss": sums["loss"],
            "eval_pair_accuracy": sums["correct"] / len(samples),
            "eval_chosen_score": sums["chosen_score"] / len(samples),
            "eval_rejected_score": sums["rejected_score"] / len(samples),
        }

    def closing_report(
        self, role: Role, validation: Sequence[PairSample], should_stop: ShouldStop
    ) -> tuple[Metrics, dict[str, Any]]:
        """Calibration error as a metric, and a report on calibration, accuracy by length and more."""
        lengths_P2 = torch.tensor([[len(pair.chosen_tokens), len(pair.rejected_tokens)] for pair in validation])
        report = pair_report(pair_scores(self, role, validation, should_stop), lengths_P2)
        return {"eval_calibration_error": report["calibration_error"]}, report

    @property
    def rescales(self) -> bool:
        return self.rm.unit_variance

    def measure_scale(self, role: Role, validation: Sequence[PairSample], should_stop: ShouldStop) -> float:
        """Standard deviation of the held-out scores."""
        return score_deviation(self, role, validation, should_stop)

    def rescaled(self, name: str) -> bool:
        return split_name(name)[1] == HEAD

    def rescale(self, role: Role, scale: float) -> str:
        """Divide the head."""
        divide_head(role, scale)
        return f"divided the head by {scale:.4g}, the standard deviation of the held-out scores"


HEAD = "output_layer.weight"
_RESPONSE_LENGTH = "response_length"
"""Column: number of response tokens, at a sequence's last token. Only where scores are means over the response."""


def scores_of_pairs(scores_BS1: Tensor, batch: MicroBatch) -> Tensor:
    """Scores of the sequences of a micro-batch, chosen and rejected in turn, [K]."""
    assert batch.layout is not None
    if (column_BS := batch.columns.get(_RESPONSE_LENGTH)) is None:
        return sequence_scores(scores_BS1, batch.layout, None)
    counts_K = column_BS.flatten()[batch.layout.ends_K.to(column_BS.device)].cpu()
    responses = TokenSpans.single(torch.tensor(batch.layout.lengths, dtype=torch.int64) - counts_K, counts_K)
    numbered = replace(batch.layout, sequences=tuple(range(len(counts_K))))  # as the rows of `responses`
    return sequence_scores(scores_BS1, numbered, responses)


def pair_scores(
    objective: RewardModelling, role: Role, pairs: Sequence[PairSample], should_stop: ShouldStop = None
) -> Tensor:
    """Scores of the chosen and the rejected response of each pair, [P, 2] on the CPU, on every rank. Collective.
    Raises: see `validation_sums`."""
    mine: dict[int, Tensor] = {}
    by_rank = objective.layouts_by_rank(role, pairs)
    for batches in rounds(objective.micro_batches(role, pairs, by_rank), role, should_stop):
        outputs = role.forward(batches, scores_of_pairs)
        if role.mesh.owns_outputs:
            for batch, scores_K in zip(batches, outputs, strict=True):
                assert batch.layout is not None
                mine |= dict(zip(batch.layout.sequences, scores_K.float().split([1] * len(scores_K)), strict=True))
    like = torch.empty(0, dtype=torch.float32, device=role.mesh.runtime.device)
    owners = owners_of_outputs(role.mesh, by_rank)
    return redistribute(mine, torch.ones(2 * len(pairs), dtype=torch.int64), like, owners).values_T.cpu().view(-1, 2)


def score_deviation(
    objective: RewardModelling, role: Role, pairs: Sequence[PairSample], should_stop: ShouldStop = None
) -> float:
    """Standard deviation of the scores of all responses of `pairs`. Collective. Raises: ValueError if it is zero."""
    sums, count = validation_sums(objective, role, pairs, should_stop), 2 * len(pairs)
    mean = (sums["chosen_score"] + sums["rejected_score"]) / count
    deviation = math.sqrt(max(0.0, sums["squared_score"] / count - mean**2))  # below 0 by rounding only
    if not deviation > 0:
        raise ValueError(
            f"all {count} held-out scores are {mean:.4g}: there is nothing to scale, the reward model has learnt "
            "nothing; train longer or set unit_variance to false"
        )
    return deviation


def divide_head(role: Role, deviation: float) -> None:
    """Divide the head, so that scores have a standard deviation of 1. The ranking stays. Rewards, and a critic that
    starts from this model, get a known scale. The optimizer must not be used afterwards."""
    with torch.no_grad():
        for name, weight in role.shard.parameters().items():
            if split_name(name)[1] == HEAD:
                weight.div_(deviation)
