"""The reward of each response: what the configured rewards say, on a common scale, added up.

They begin as soon as the responses are there, and are waited for when their numbers are needed.

Legend: B rows, S positions, N samples of the step, K rewards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.reward_scaling import RunningMoments, group_normalised, weighted_total
from megarlhf.architectures.hf_config import read_config, score_of_config
from megarlhf.config import MicroBatchConfig, RewardConfig
from megarlhf.config.rewards import unique_labels
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.text.omissions import Kind
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.errors import RewardError, WatchdogTimeout
from megarlhf.experience import Experience, Ragged
from megarlhf.kernels import packed_sums
from megarlhf.models.role import Role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult, short
from megarlhf.rollout.rewards.score import (
    PendingBatch,
    RewardSource,
    ShouldStop,
    gather_rewards,
    local_reward_batch,
    make_source,
)
from megarlhf.trainers.experience.batches import forward_per_sample
from megarlhf.trainers.experience.no_signal import SignalWatch
from megarlhf.trainers.experience.plan import StepPlan
from megarlhf.trainers.experience.retokenize import retokenized, retokenizer_of
from megarlhf.trainers.experience.sequence_scores import sequence_scores

log = logging.getLogger(__name__)

NAN = float("nan")
_SIGNAL = "(signal)"
"""Among the states; no reward has such a name."""


def model_scores(reward_model: Role, experience: Experience, micro: MicroBatchConfig) -> Tensor:
    """The reward model's score of each response, [N]: of its last token or the mean over its tokens, as the model was
    trained."""
    directory = reward_model.section.model.hf_directory()
    score_of = score_of_config(read_config(directory), directory)

    def score(scores_BS1: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.layout is not None
        lengths_K = experience.response_lengths_N[list(batch.layout.sequences)]
        return sequence_scores(scores_BS1, batch.layout, None if score_of == "last_token" else lengths_K)

    return forward_per_sample(reward_model, experience, StepPlan.whole(experience, micro), score)


@dataclass(frozen=True)
class RewardOutput:
    """Values of one reward for the samples of a step."""

    values_N: Tensor
    """fp64, so that sums that are equal on paper are equal; NaN where it does not apply, or failed."""
    failed_N: Tensor
    """bool."""
    late: bool = False
    """Some have failed because nothing answered in time."""
    cut_N: Tensor | None = None
    """bool: whose text was too long, and was cut; None: none can be."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each, NaN where a sample has none of the name."""
    token_values: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """By sample; its value is their sum."""

    @staticmethod
    def joined(parts: Sequence[tuple[RewardOutput, Sequence[int]]]) -> RewardOutput:
        """Values of chosen samples, one part after the other."""
        names = sorted({name for said, _ in parts for name in said.components})
        token_values: dict[int, tuple[float, ...]] = {}
        place = 0
        for said, chosen in parts:
            numbered = enumerate(chosen, start=place)
            token_values |= {at: said.token_values[n] for at, n in numbered if n in said.token_values}
            place += len(chosen)
        return RewardOutput(
            values_N=torch.cat([said.values_N[list(chosen)] for said, chosen in parts]),
            failed_N=torch.cat([said.failed_N[list(chosen)] for said, chosen in parts]),
            components={
                name: torch.cat([said.component(name)[list(chosen)] for said, chosen in parts]) for name in names
            },
            token_values=token_values,
            late=any(said.late for said, _ in parts),
            cut_N=_joined([(said.cut_N, chosen) for said, chosen in parts]),
        )

    def component(self, name: str) -> Tensor:
        """NaN where there is none."""
        return self.components.get(name, torch.full_like(self.values_N, NAN))


def _joined(parts: Sequence[tuple[Tensor | None, Sequence[int]]]) -> Tensor | None:
    columns = [column[list(chosen)] for column, chosen in parts if column is not None]
    return torch.cat(columns) if columns else None


@dataclass(frozen=True)
class CombinedRewards:
    """The rewards of a step, the same on every rank."""

    rewards_N: Tensor
    """The weighted sum, without what is in `token_rewards`; 0 for what is not kept."""
    kept_N: Tensor
    """bool: some reward applies, and none has failed."""
    token_rewards: Ragged | None
    """Rewards of single tokens, where any reward gives them."""
    metrics: dict[str, float]
    per_sample: Mapping[str, Tensor]
    """By `reward/NAME`: what each reward said, before shift, clip and weight; NaN where it said nothing."""

    @property
    def totals_N(self) -> Tensor:
        """The weighted sum, with the rewards of tokens; of no meaning for what is not kept."""
        if (column := self.token_rewards) is None:
            return self.rewards_N
        return self.rewards_N + packed_sums(column.values_T, column.cu_seqlens)


class Rewarder:
    """The configured rewards of a run."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        reward_model: Role | None,
        tokenizer: Tokenizer,
        micro: MicroBatchConfig,
        device: torch.device,
        phases: Phases | None = None,
        *,
        unrewarded: str = "stop",
        may_drop: tuple[Kind, ...] = (),
    ) -> None:
        """may_drop: what the reward model's own chat template may leave out of a conversation"""
        self.rewards, self.reward_model, self.tokenizer = rewards, reward_model, tokenizer
        self.device = device
        self._micro, self._phases, self._unrewarded = micro, phases or Phases(), unrewarded
        self.labels = unique_labels(rewards)
        named = zip(self.labels, rewards, strict=True)
        self._sources: dict[str, RewardSource] = {
            label: make_source(reward, device) for label, reward in named if reward.kind != "model"
        }
        self._retokenizers = {
            label: retokenizer_of(reward_model, reward, micro, may_drop)
            for label, reward in zip(self.labels, rewards, strict=True)
            if reward.retokenize and reward_model is not None
        }
        self._moments = {label: RunningMoments() for label in self.labels}
        self.signal = SignalWatch()

    def state_dict(self) -> dict[str, Any]:
        """The running moments of each reward, and what `signal` has counted."""
        moments = {name: [each.count, each.mean, each.squares] for name, each in self._moments.items()}
        return {**moments, _SIGNAL: self.signal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _SIGNAL in state:
            self.signal.load_state_dict(state[_SIGNAL])
        self._moments |= {name: RunningMoments(*state[name]) for name in self._moments if name in state}

    def close(self) -> None:
        """End processes and threads."""
        for source in self._sources.values():
            source.close()

    def start(self, experience: Experience, prompts: Sequence[PromptSample]) -> PendingRewards:
        """Begin with the step's samples; `prompts` are one per sample. Nothing is waited for."""
        batch = local_reward_batch(prompts, experience.rollouts, self.tokenizer)
        waiting = {label: source.start(batch) for label, source in self._sources.items()}
        return PendingRewards(self, experience, prompts, batch, waiting)

    def mean(self, experience: Experience, prompts: Sequence[PromptSample], should_stop: ShouldStop) -> float:
        """Mean validation reward. Samples to which no reward applies are ignored."""
        return float(self.validation(experience, prompts, should_stop)[0].nanmean())

    def validation(
        self, experience: Experience, prompts: Sequence[PromptSample], should_stop: ShouldStop
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rewards of held-out samples: the weighted sum, and the value of each reward by name, [N] each. Nothing is
        normalised, since that scale changes over a run. NaN where no reward, or this one, applies. Collective."""
        said = self.start(experience, prompts).said(should_stop)
        return totals_of(self.rewards, said), {label: s.values_N for label, s in zip(self.labels, said, strict=True)}

    def combined(
        self,
        experience: Experience,
        prompts: Sequence[PromptSample],
        said: Sequence[RewardOutput],
        *,
        learn: bool = True,
    ) -> CombinedRewards:
        """Add up the rewards of the samples; `prompts` are one per sample.

        Raises: RewardError where no sample has a reward; WatchdogTimeout where that is for want of an answer.
        """
        groups_N = experience.groups_N.to(self.device)
        failed_N = torch.stack([each.failed_N for each in said]).any(0)
        metrics: dict[str, float] = {}
        tokens: list[Tensor] = []
        at_end: list[Tensor] = []
        for label, reward, each in zip(self.labels, self.rewards, said, strict=True):
            values_N = bounded(reward, each.values_N).masked_fill(failed_N, NAN)
            if reward.normalise != "none":  # divides by a deviation, which must not be one of rounding
                values_N = values_N.float().double()
            if reward.normalise == "running":
                if learn:
                    self._moments[label].update(values_N)
                values_N = self._moments[label].normalise(values_N)
            elif reward.normalise == "group":
                values_N = group_normalised(values_N, groups_N, eps=reward.normalise_eps)
            metrics |= metrics_of(label, each)
            if each.token_values:
                tokens.append(reward.weight * self._per_token(label, reward, experience, each))
                values_N[list(each.token_values)] = 0.0
            at_end.append(values_N)
        total_N = weighted_total(torch.stack(at_end), [reward.weight for reward in self.rewards]).float()
        kept_N = ~(total_N.isnan() | failed_N)
        metrics |= self.counts(said)
        if not bool(kept_N.any()):
            words = (
                f"{_lost(~kept_N, prompts)} have no reward: every reward said None, or one has failed and is dropped. "
                "Nothing is left to train on"
            )
            if any(each.late for each in said):
                raise WatchdogTimeout(f"{words}. Look at what does not answer", agreed=True)
            raise RewardError(words)
        lengths_N = experience.response_lengths_N
        column = Ragged(torch.stack(tokens).sum(0), lengths_N) if tokens else None
        named = {f"reward/{label}": each.values_N.float() for label, each in zip(self.labels, said, strict=True)}
        return CombinedRewards(total_N.masked_fill(~kept_N, 0.0), kept_N, column, metrics, named)

    def _per_token(self, label: str, reward: RewardConfig, experience: Experience, said: RewardOutput) -> Tensor:
        if reward.normalise != "none" or reward.clip is not None or reward.shift:
            raise RewardError(
                f"reward {label!r} gives rewards of tokens, for which shift, clip and normalise are not made; leave "
                "them out"
            )
        lengths = experience.response_lengths_N.tolist()
        rows = [torch.tensor(said.token_values.get(n, (0.0,) * length)) for n, length in enumerate(lengths)]
        return torch.cat(rows).to(self.device, torch.float32)

    def counts(self, said: Sequence[RewardOutput]) -> dict[str, float]:
        """`reward/NAME_none`, `reward/NAME_failed`, and how many samples are without a reward."""
        counts: dict[str, float] = {}
        for label, each in zip(self.labels, said, strict=True):
            missing, failed = int(each.values_N.isnan().sum()), int(each.failed_N.sum())
            counts |= {f"reward/{label}_none": missing - failed, f"reward/{label}_failed": failed}
        return {**counts, "samples_without_reward": int(totals_of(self.rewards, said).isnan().sum())}

    def require_rewards(self, prompts: Sequence[PromptSample], said: Sequence[RewardOutput]) -> None:
        """Report drawn samples to which no reward applies, whether they are trained on or not; `prompts` are one per
        sample. Raises: RewardError where that ends the run."""
        failed_N = torch.stack([each.failed_N for each in said]).any(0)
        unrewarded_N = totals_of(self.rewards, said).isnan() & ~failed_N
        if not bool(unrewarded_N.any()):
            return
        words = f"{_lost(unrewarded_N, prompts)} got no reward: every reward said None"
        if self._unrewarded == "stop":
            raise RewardError(
                f"{words}. Add a reward that applies, clean the data, or leave such samples out of training: "
                "algo.unrewarded = drop"
            )
        log.info("%s; left out (algo.unrewarded = drop)", words)


def _lost(lost_N: Tensor, prompts: Sequence[PromptSample]) -> str:
    """How many, and the row of the first."""
    lost = lost_N.nonzero().flatten().tolist()
    first = prompts[lost[0]]
    return (
        f"{len(lost)} of {len(lost_N)} samples of this step (the first is sample {lost[0]}, record {first.index + 1} "
        f"of the prompts: {short(first.text)}, fields {short(first.fields)})"
    )


@dataclass(frozen=True)
class PendingRewards:
    """Rewards of a step that have begun."""

    rewarder: Rewarder
    experience: Experience
    prompts: Sequence[PromptSample]
    batch: RewardBatch
    """This rank's share."""
    waiting: Mapping[str, PendingBatch]

    def said(self, should_stop: ShouldStop = lambda: False) -> list[RewardOutput]:
        """Wait for the values of each reward, on every rank. Collective. Raises: see `score.gather_rewards`."""
        rewarder, found = self.rewarder, []
        for label, reward in zip(rewarder.labels, rewarder.rewards, strict=True):
            if reward.kind == "model":
                found.append(self._said_by_model(label))
                continue
            outcomes = gather_rewards(
                label,
                self.waiting[label],
                self.batch,
                drop_failures=reward.on_failure == "drop",
                local=rewarder._phases.local,
                should_stop=should_stop,
            )
            found.append(said_of(label, outcomes, rewarder.device))
        return found

    def _said_by_model(self, label: str) -> RewardOutput:
        """Collective."""
        rewarder, experience, cut_N = self.rewarder, self.experience, None
        assert rewarder.reward_model is not None
        if (retokenizer := rewarder._retokenizers.get(label)) is not None:
            experience, cut_N = retokenized(label, experience, self.batch, retokenizer)
        scores_N = require_finite(model_scores(rewarder.reward_model, experience, rewarder._micro))
        return RewardOutput(scores_N.double(), torch.zeros_like(scores_N, dtype=torch.bool), cut_N=cut_N)

    def finish(self, should_stop: ShouldStop = lambda: False, *, learn: bool = True) -> CombinedRewards:
        """Wait for all of them, and add them up. Collective.

        learn: running moments take these values in

        Raises: as `said`; RewardError for samples without a reward, where these end the run.
        """
        said = self.said(should_stop)
        self.rewarder.require_rewards(self.prompts, said)
        return self.rewarder.combined(self.experience, self.prompts, said, learn=learn)


def said_of(label: str, outcomes: Sequence[RewardResult], device: torch.device) -> RewardOutput:
    """Outcomes as columns; what failed is said once, and counted."""
    failures = [outcome.error for outcome in outcomes if outcome.error]
    if failures:
        log.info("%d of %d samples are dropped: %s", len(failures), len(outcomes), failures[0])
    names = sorted({name for outcome in outcomes for name in outcome.components or ()})

    def column(values: Sequence[float | None]) -> Tensor:
        return torch.tensor([NAN if value is None else value for value in values], dtype=torch.float64, device=device)

    return RewardOutput(
        values_N=column([outcome.value for outcome in outcomes]),
        failed_N=torch.tensor([bool(outcome.error) for outcome in outcomes], device=device),
        late=any(outcome.late for outcome in outcomes),
        components={name: column([(outcome.components or {}).get(name) for outcome in outcomes]) for name in names},
        token_values={n: each.token_values for n, each in enumerate(outcomes) if each.token_values is not None},
    )


def totals_of(rewards: Sequence[RewardConfig], said: Sequence[RewardOutput]) -> Tensor:
    """The weighted sum of what is said, less `shift` and clipped, without normalisation: [N], NaN where no reward
    applies or one has failed. fp32, after the sum."""
    values_KN = torch.stack([bounded(reward, each.values_N) for reward, each in zip(rewards, said, strict=True)])
    failed_KN = torch.stack([each.failed_N for each in said])
    return weighted_total(values_KN, [reward.weight for reward in rewards], failed_KN).float()


def bounded(reward: RewardConfig, values_N: Tensor) -> Tensor:
    """Less `shift`, then held by `clip`."""
    values_N = values_N - reward.shift
    return values_N if reward.clip is None else values_N.clamp(-reward.clip, reward.clip)


def metrics_of(label: str, said: RewardOutput) -> dict[str, float]:
    """`reward/NAME_mean`, `_std` over the samples to which it applies; the mean of each component."""
    values_N = said.values_N[~said.values_N.isnan()]
    metrics: dict[str, float] = {}
    if said.cut_N is not None and (truncated := int(said.cut_N.sum())):
        metrics[f"reward/{label}_truncated"] = truncated
    if len(values_N):
        metrics |= {
            f"reward/{label}_mean": float(values_N.mean()),
            f"reward/{label}_std": float(values_N.std(correction=0)),
        }
    return metrics | {f"reward/{label}/{name}": float(x_N.nanmean()) for name, x_N in said.components.items()}


def require_finite(scores_N: Tensor) -> Tensor:
    """Raises: FloatingPointError for a score of the reward model that is not finite."""
    if not bool(scores_N.isfinite().all()):
        worst = int((~scores_N.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"the reward model's score of sample {worst} is {float(scores_N[worst])}; look at its checkpoint and dtype"
        )
    return scores_N
