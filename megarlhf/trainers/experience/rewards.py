"""Rewards of the responses: values of each configured reward, brought to a common scale and added up.

They are started as soon as the responses are there, and waited for when their values are needed.

Legend: B rows, S positions, N samples of the step, K rewards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.reward_scaling import RunningMoments, group_normalised, weighted_total
from megarlhf.architectures.hf_config import read_config, score_of_config
from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig, RewardConfig
from megarlhf.config.rewards import unique_labels
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.text.omissions import Kind
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.errors import RewardError, WatchdogTimeout
from megarlhf.experience import Experience
from megarlhf.kernels import packed_sums
from megarlhf.models.role import Role
from megarlhf.observe.terminal.activity import Activity, Part
from megarlhf.observe.watch.phases import Phases
from megarlhf.own_code.failures import short
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.score import (
    PendingBatch,
    RewardSource,
    ShouldStop,
    gather_rewards,
    local_reward_batch,
    make_source,
    start_rewards,
)
from megarlhf.trainers.experience.batches import forward_per_sample, response_spans
from megarlhf.trainers.experience.no_signal import SignalWatch
from megarlhf.trainers.experience.plan import StepPlan
from megarlhf.trainers.experience.retokenize import retokenized, retokenizer_of
from megarlhf.trainers.experience.reward_outputs import (
    NAN,
    RewardOutput,
    bounded,
    environment_output,
    metrics_of,
    reward_output,
    totals_of,
    without_failures,
)
from megarlhf.trainers.experience.sequence_scores import sequence_scores

log = logging.getLogger(__name__)

_SIGNAL = "(signal)"
"""Key of the `SignalWatch` in the state. No reward has such a name."""


def model_scores(reward_model: Role, experience: Experience, micro: MicroBatchConfig) -> Tensor:
    """Scores of the samples by the reward model, [N]: at the last token or the mean over the sampled tokens, as the
    model was trained."""
    directory = reward_model.section.model.hf_directory()
    at_last_token = score_of_config(read_config(directory), directory) == "last_token"
    averaged = None if at_last_token else response_spans(experience)

    def score(scores_BS1: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.layout is not None
        return sequence_scores(scores_BS1, batch.layout, averaged)

    return forward_per_sample(reward_model, experience, StepPlan.whole(experience, micro), score)


@dataclass(frozen=True)
class CombinedRewards:
    """The rewards of a step, the same on every rank."""

    rewards_N: Tensor
    """Weighted sum without `token_rewards`; 0 for samples that are not kept."""
    kept_N: Tensor
    """bool: at least one reward applies, and none has failed."""
    token_rewards: Ragged | None
    """Rewards of single tokens, where any reward gives them."""
    metrics: dict[str, float]
    per_sample: Mapping[str, Tensor]
    """Values of each reward before shift, clip and weight, by `reward/NAME`; NaN where it does not apply."""

    @property
    def totals_N(self) -> Tensor:
        """Weighted sum with the rewards of tokens. Samples that are not kept have no meaningful value."""
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
        environment: Environment | None = None,
    ) -> None:
        """may_drop: parts of a conversation that the reward model's own chat template may leave out"""
        self.environment = environment
        self.rewards, self.reward_model, self.tokenizer = rewards, reward_model, tokenizer
        self.device = device
        self._micro, self._phases, self._unrewarded = micro, phases or Phases(), unrewarded
        self.labels = unique_labels(rewards)
        by_label = dict(zip(self.labels, rewards, strict=True))
        self._sources: dict[str, RewardSource] = {
            label: make_source(reward, device)
            for label, reward in by_label.items()
            if reward.kind not in ("model", "environment")
        }
        self._retokenizers = {
            label: retokenizer_of(reward_model, reward, micro, may_drop)
            for label, reward in by_label.items()
            if reward.retokenize and reward_model is not None
        }
        self._moments = {label: RunningMoments() for label in self.labels}
        self.signal = SignalWatch()

    def state_dict(self) -> dict[str, Any]:
        """Running moments of each reward, and the counts of `signal`."""
        state = {label: [moments.count, moments.mean, moments.squares] for label, moments in self._moments.items()}
        return {**state, _SIGNAL: self.signal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _SIGNAL in state:
            self.signal.load_state_dict(state[_SIGNAL])
        self._moments |= {label: RunningMoments(*state[label]) for label in self._moments if label in state}

    def close(self) -> None:
        """End processes and threads, those of the environment too."""
        if self.environment is not None:
            self.environment.close()
        for source in self._sources.values():
            source.close()

    def start(self, experience: Experience, prompts: Sequence[PromptSample]) -> PendingRewards:
        """Start the rewards of the step's samples, without waiting; `prompts` are one per sample."""
        batch = local_reward_batch(prompts, experience.rollouts, self.tokenizer, self.environment)
        pending = {label: start_rewards(source, batch) for label, source in self._sources.items()}
        return PendingRewards(self, experience, prompts, batch, pending)

    def validation(
        self, experience: Experience, prompts: Sequence[PromptSample], should_stop: ShouldStop
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rewards of held-out samples: weighted sum, and values of each reward by name, [N] each. Collective.

        Nothing is normalised, since that scale changes over a run. The sum is NaN where no reward applies, a value
        where its reward does not."""
        outputs = self.start(experience, prompts).wait(should_stop)
        values = {label: output.values_N for label, output in zip(self.labels, outputs, strict=True)}
        return totals_of(self.rewards, outputs), values

    def combined(
        self,
        experience: Experience,
        prompts: Sequence[PromptSample],
        outputs: Sequence[RewardOutput],
        *,
        learn: bool = True,
    ) -> CombinedRewards:
        """Add up the rewards of the samples; `prompts` are one per sample.

        Raises: RewardError where no sample has a reward; WatchdogTimeout where the reason is a missing answer.
        """
        groups_N = experience.groups_N.to(self.device)
        failed_N = _any_failed(outputs)
        metrics: dict[str, float] = {}
        token_rewards: list[Tensor] = []
        per_response: list[Tensor] = []
        for label, reward, output in zip(self.labels, self.rewards, outputs, strict=True):
            values_N = bounded(reward, output.values_N).masked_fill(failed_N, NAN)
            if reward.normalise != "none":  # divides by a deviation, which must not be one of rounding
                values_N = values_N.float().double()
            if reward.normalise == "running":
                if learn:
                    self._moments[label].update(values_N)
                values_N = self._moments[label].normalise(values_N)
            elif reward.normalise == "group":
                values_N = group_normalised(values_N, groups_N, eps=reward.normalise_eps)
            metrics |= metrics_of(label, output)
            if output.token_values:
                token_rewards.append(reward.weight * self._per_token(label, reward, experience, output))
                values_N[list(output.token_values)] = 0.0
            per_response.append(values_N)
        total_N = weighted_total(torch.stack(per_response), [reward.weight for reward in self.rewards]).float()
        kept_N = ~(total_N.isnan() | failed_N)
        metrics |= self.counts(outputs)
        if not bool(kept_N.any()):
            message = (
                f"{_describe_samples(~kept_N, prompts)} have no reward: every reward said None, or one has failed and "
                "is dropped, or so has the environment (see the warnings above). Nothing is left to train on"
            )
            if any(output.late for output in outputs):
                raise WatchdogTimeout(f"{message}. Look at what does not answer", agreed=True)
            raise RewardError(message)
        column = Ragged(torch.stack(token_rewards).sum(0), experience.response_lengths_N) if token_rewards else None
        named = {f"reward/{label}": output.values_N.float() for label, output in zip(self.labels, outputs, strict=True)}
        return CombinedRewards(total_N.masked_fill(~kept_N, 0.0), kept_N, column, metrics, named)

    def _per_token(self, label: str, reward: RewardConfig, experience: Experience, output: RewardOutput) -> Tensor:
        if reward.normalise != "none" or reward.clip is not None or reward.shift:
            raise RewardError(
                f"reward {label!r} gives rewards of tokens, to which shift, clip and normalise do not apply; leave "
                "them out"
            )
        lengths = experience.response_lengths_N.tolist()
        rows = [torch.zeros(length) for length in lengths]
        for n, values in output.token_values.items():  # of a function: those of the last turn
            rows[n][lengths[n] - len(values) :] = torch.as_tensor(values)
        return torch.cat(rows).to(self.device, torch.float32)

    def counts(self, outputs: Sequence[RewardOutput]) -> dict[str, float]:
        """`reward/NAME_none`, `reward/NAME_failed`, and the number of samples without a reward."""
        counts: dict[str, float] = {}
        for label, output in zip(self.labels, outputs, strict=True):
            not_applicable, failed = output.count_missing()
            counts |= {f"reward/{label}_none": not_applicable, f"reward/{label}_failed": failed}
        return {**counts, "samples_without_reward": int(totals_of(self.rewards, outputs).isnan().sum())}

    def require_rewards(self, prompts: Sequence[PromptSample], outputs: Sequence[RewardOutput]) -> None:
        """Report drawn samples to which no reward applies, whether they are trained on or not; `prompts` are one per
        sample. Raises: RewardError where that ends the run."""
        unrewarded_N = totals_of(self.rewards, outputs).isnan() & ~_any_failed(outputs)
        if not bool(unrewarded_N.any()):
            return
        message = f"{_describe_samples(unrewarded_N, prompts)} got no reward: every reward said None"
        if self._unrewarded == "stop":
            raise RewardError(
                f"{message}. Add a reward that applies, clean the data, or leave such samples out of training: "
                "algo.unrewarded = drop"
            )
        log.info("%s; left out (algo.unrewarded = drop)", message)


def _any_failed(outputs: Sequence[RewardOutput]) -> Tensor:
    return torch.stack([output.failed_N for output in outputs]).any(0)


def _describe_samples(marked_N: Tensor, prompts: Sequence[PromptSample]) -> str:
    """Number of the marked samples, with sample, record and prompt of the first."""
    marked = marked_N.nonzero().flatten().tolist()
    first = prompts[marked[0]]
    return (
        f"{len(marked)} of {len(marked_N)} samples of this step (the first is sample {marked[0]}, record "
        f"{first.index + 1} of the prompts: {short(first.text)}, fields {short(first.fields)})"
    )


@dataclass(frozen=True)
class PendingRewards:
    """Rewards of a step that were started."""

    rewarder: Rewarder
    experience: Experience
    prompts: Sequence[PromptSample]
    batch: RewardBatch
    """This rank's share of the samples."""
    pending: Mapping[str, PendingBatch]

    def counting(self, activity: Activity) -> AbstractContextManager[None]:
        """Scope of a wait whose progress is shown: results of all rewards but those of models."""
        samples, share = self.experience.num_samples, len(self.batch) / max(1, self.experience.num_samples)
        if not self.pending or not share:
            return nullcontext()
        total = samples * len(self.pending)
        return activity.counting(
            total, "rewards", lambda: Part(sum(pending.done for pending in self.pending.values())), share=share
        )

    def wait(self, should_stop: ShouldStop = lambda: False) -> list[RewardOutput]:
        """Wait for the values of each reward, on every rank. Collective. Raises: see `score.gather_rewards`."""
        rewarder = self.rewarder
        outputs: list[RewardOutput] = []
        for label, reward in zip(rewarder.labels, rewarder.rewards, strict=True):
            if reward.kind == "model":
                outputs.append(self._run_model(label))
                continue
            if reward.kind == "environment":
                outputs.append(environment_output(self.experience.rollouts, rewarder.device))
                continue
            results = gather_rewards(
                label,
                self.pending[label],
                self.batch,
                self.experience.num_samples,
                drop_failures=reward.on_failure == "drop",
                local=rewarder._phases.local,
                should_stop=should_stop,
            )
            outputs.append(reward_output(results, rewarder.device))
        return [without_failures(output, self.experience.rollouts) for output in outputs]

    def _run_model(self, label: str) -> RewardOutput:
        """Score the samples with the reward model. Collective."""
        rewarder, experience, cut_N = self.rewarder, self.experience, None
        assert rewarder.reward_model is not None
        if (retokenizer := rewarder._retokenizers.get(label)) is not None:
            experience, cut_N = retokenized(label, experience, self.batch, retokenizer)
        scores_N = require_finite(model_scores(rewarder.reward_model, experience, rewarder._micro))
        return RewardOutput(scores_N.double(), torch.zeros_like(scores_N, dtype=torch.bool), cut_N=cut_N)

    def finish(self, should_stop: ShouldStop = lambda: False, *, learn: bool = True) -> CombinedRewards:
        """Wait for all rewards and add them up. Collective.

        learn: whether these values update the running moments

        Raises: as `wait`; RewardError for samples without a reward, where these end the run.
        """
        outputs = self.wait(should_stop)
        self.rewarder.require_rewards(self.prompts, outputs)
        return self.rewarder.combined(self.experience, self.prompts, outputs, learn=learn)


def require_finite(scores_N: Tensor) -> Tensor:
    """Raises: FloatingPointError for a score of the reward model that is not finite."""
    if not bool(scores_N.isfinite().all()):
        worst = int((~scores_N.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"the reward model's score of sample {worst} is {float(scores_N[worst])}; look at its checkpoint and dtype"
        )
    return scores_N
