"""The updates of a step of rl: actor and critic trained on the samples of a finished experience."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megarlhf.config import RLConfig
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.observe.records.metrics import Metric
from megarlhf.parallel.router_balance import ROUTER_AUX_LOSS
from megarlhf.parallel.step import StepResult
from megarlhf.rollout.engine import sample_seed
from megarlhf.trainers.experience.batches import (
    loss_weights,
    micro_batches,
    per_token_of,
    shared_prompts,
    split_into_mini_batches,
)
from megarlhf.trainers.rl.advantages import add_advantages, whiten_per_mini_batch
from megarlhf.trainers.rl.build import Components
from megarlhf.trainers.rl.logprob_gap import add_rollout_correction, logprob_gap
from megarlhf.trainers.rl.losses import PolicyLoss, ValueLoss
from megarlhf.trainers.run.skipped_steps import Update

Metrics = dict[str, Metric]

OF_UPDATES = {
    "actor": ("actor_grad_norm", "actor_learning_rate"),
    "critic": ("critic_grad_norm", "critic_learning_rate"),
}
"""Metrics of an update, by role."""

OF_PROMPTS = ("prompts_computed", "prompts_saved")
"""Metrics of all updates of a step together: prompts in one pass over each mini-batch."""

POLICY_COLUMNS = ("old_logprobs", "ref_logprobs", "advantages", "rollout_weights", "rollout_logprobs")
"""What the policy's loss reads, as far as it is there."""


class UpdateCallback(Protocol):
    """Called after an update of a step; `last`: after its last one."""

    def __call__(self, work: StepState, last: bool) -> None: ...


def mini_batches_of_pass(cfg: RLConfig, experience: Experience, step: int, number: int) -> list[list[int]]:
    """The mini-batches of one pass over the step's samples."""
    return split_into_mini_batches(
        experience.prompt_numbers_N.tolist(),
        cfg.train.mini_batch_samples,
        shuffle=cfg.train.shuffle,
        seed=sample_seed(cfg.run.seed, step, -2 - number),
    )


@dataclass
class StepState:
    """A step whose samples are ready to be trained on: what a resume point inside a step holds."""

    experience: Experience
    found: Mapping[str, float]
    """Metrics of the step so far."""
    per_update: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    """Metrics of the updates made; None where one was skipped."""
    updates: int = 0

    @classmethod
    def begun(
        cls, cfg: RLConfig, components: Components, experience: Experience, rewards: Mapping[str, float]
    ) -> StepState:
        """From scored samples: with their advantages, and what corrects for the rollout's numerics. `rewards`: what the
        rewards were like."""
        work = cls(add_advantages(experience, cfg.algo, components.kl.coef), {**components.kl.metrics(), **rewards})
        if "old_logprobs" in experience.columns:
            work.compare_with_rollout(cfg)
        return work

    def compare_with_rollout(self, cfg: RLConfig) -> None:
        """Once there are old log-probs: how far they are from the engine's, and what corrects for it."""
        self.experience, cut = add_rollout_correction(self.experience, cfg.algo.rollout_correction)
        self.found = {**self.found, **logprob_gap(self.experience), **cut}

    def table(self) -> Callable[[], dict[str, Any]]:
        """For a resume point: what makes its content when it is written, of the step as it is now. Collective, since
        the columns are brought together for it."""
        experience, found, updates = self.experience, dict(self.found), self.updates
        per_update = {name: list(values) for name, values in self.per_update.items()}

        def content() -> dict[str, Any]:
            whole = experience.replicated().state_dict()
            return {"experience": whole, "found": found, "per_update": per_update, "updates": updates}

        return content

    def note(self, result: StepResult, values: Mapping[str, float]) -> None:
        """Take down the metrics of an optimizer step, or that it was skipped."""
        self.per_update["skipped"].append(float(bool(result.skipped)))
        for name, value in values.items():
            self.per_update[name].append(None if result.skipped else value)

    def moved_beyond(self, limit: float | None) -> bool:
        """Whether an update of this step has shown a KL of old to new policy above the limit."""
        return limit is not None and any(kl is not None and kl > limit for kl in self.per_update["policy_kl"])

    @classmethod
    def restored(cls, table: Mapping[str, Any] | None) -> StepState | None:
        """From what `table` returned; None from nothing."""
        if table is None:
            return None
        per_update: dict[str, list[float | None]] = defaultdict(list, table["per_update"])
        return cls(Experience.from_state_dict(table["experience"]), table["found"], per_update, table["updates"])


def train_on(
    cfg: RLConfig,
    components: Components,
    work: StepState,
    step: int,
    at_border: UpdateCallback = lambda work, last: None,
    watch: Callable[[Mapping[str, float]], None] = lambda found: None,
) -> Metrics:
    """Every pass over the step's samples, one optimizer step per mini-batch; those that a resumed step has made are not
    made again. `at_border` is called after each. Means over mini-batches.

    Where the first update's forward makes the old log-probs, `watch` is told the gap to the engine before the weights
    are changed.
    """
    phases, experience = components.phases, work.experience
    passes = [mini_batches_of_pass(cfg, experience, step, number) for number in range(cfg.train.epochs_per_step)]
    updates = list(itertools.chain.from_iterable(passes))
    for samples in updates[work.updates :]:
        update = Update(step + 1, work.updates, samples)
        for name, count in shared_prompts(components.trained[0], experience, samples, cfg.train).items():
            work.per_update[name].append(count)
        for learner in learners(cfg, components, experience, samples, step):
            role = learner.role
            assert role.trainer is not None
            if role is components.actor and work.moved_beyond(cfg.train.max_policy_kl):
                continue
            learning_rate = role.trainer.learning_rate
            with phases(f"train/{role.name}"):
                batches = micro_batches(
                    role, learner.experience, samples, cfg.train, learner.columns, learner.weights_N
                )
                if components.ptx is not None and role is components.actor:
                    number = step * len(updates) + work.updates
                    batches, tokens = components.ptx.beside(role, cfg, number, batches)
                    phases.count("tokens_per_second", float(tokens))
                sums = role.accumulate(batches, learner.loss)
                if isinstance(learner.loss, PolicyLoss) and learner.loss.seen is not None:
                    seen = per_token_of(role, experience, [samples], cfg.train, learner.loss.seen)
                    work.experience = experience = work.experience.with_columns({"old_logprobs": seen})
                    work.compare_with_rollout(cfg)
                    watch(work.found)
            result = components.bad_steps[role.name].apply(role, sums, update, batches, learner.loss)
            values = {name: sums[name] / per for name, per in learner.loss.per.items()}
            if ROUTER_AUX_LOSS in sums:
                values[f"{role.name}_{ROUTER_AUX_LOSS}"] = sums[ROUTER_AUX_LOSS]
            if components.ema is not None and role is components.actor and not result.skipped:
                components.ema.update()
            work.note(result, values | dict(zip(OF_UPDATES[role.name], (result.grad_norm, learning_rate), strict=True)))
        phases.count("tokens_per_second", float(experience.sequences.lengths_N[list(samples)].sum()))
        work.updates += 1
        at_border(work, last=work.updates == len(updates))
    metrics: Metrics = {name: mean_of(each) for name, each in work.per_update.items() if name != "skipped"}
    metrics |= {name: round(sum(filter(None, work.per_update[name]))) for name in OF_PROMPTS}
    metrics["skipped_steps"] = round(sum(filter(None, work.per_update["skipped"])))
    if cfg.train.max_policy_kl is not None and work.per_update["policy_kl"]:
        metrics["actor_updates_left_out"] = len(updates) - len(work.per_update["policy_kl"])
    if work.per_update["ratio_deviation"] and not cfg.old_logprobs_in_training(step):  # else it is 0 by construction
        metrics["first_ratio_deviation"] = work.per_update["ratio_deviation"][0]
    return metrics


@dataclass(frozen=True)
class Learner:
    """A role that learns from a mini-batch: what it reads of the samples, and its loss."""

    role: Role
    loss: PolicyLoss | ValueLoss
    columns: tuple[str, ...]
    weights_N: Tensor
    """Of each token of each sample, in the loss."""
    experience: Experience


def learners(
    cfg: RLConfig, components: Components, experience: Experience, samples: Sequence[int], step: int
) -> Iterator[Learner]:
    """The roles that learn from the mini-batch `samples` in step `step`, in their order."""
    actor, critic, algo = components.actor, components.critic, cfg.algo
    tokens = max(1, int(experience.response_lengths_N[list(samples)].sum()))  # of metrics, which are of all of them
    if step >= cfg.train.critic_warmup_steps or critic is None:
        in_training = "old_logprobs" not in experience.columns
        loss = PolicyLoss(
            algo=algo,
            temperature=cfg.rollout.temperature,
            vocabulary=actor.shard.vocabulary(),
            response_tokens=tokens,
            kl_coef=components.kl.coef if algo.kl.placement == "loss" else 0.0,
            entropy_coef=algo.entropy_coef_at(step, cfg.train.num_steps),
            ptx_coef=0.0 if cfg.ptx is None else cfg.ptx.coef,
            seen=[] if in_training else None,
        )
        if in_training and algo.rollout_correction.kind != "none":
            experience = experience.with_columns({"rollout_logprobs": experience.rollout_logprobs})
        columns = tuple(name for name in POLICY_COLUMNS if name in experience.columns)
        weights_N = loss_weights(
            experience,
            samples,
            algo.loss_average,
            cfg.loss_constant,
            algo.loss_block_samples,
            count_left_out=algo.loss_counts_left_out,
        )
        yield Learner(actor, loss, columns, weights_N, whiten_per_mini_batch(experience, samples, algo))
    if critic is not None:
        value_loss = ValueLoss(clip=algo.value_clip, response_tokens=tokens)
        weights_N = loss_weights(experience, samples, "token")
        yield Learner(critic, value_loss, ("values", "returns"), weights_N, experience)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Of those that there are; None where there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
