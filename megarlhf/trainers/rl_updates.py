"""The updates of a step of rl: actor and critic trained on the samples of a finished experience."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarlhf.config import RLConfig
from megarlhf.experience import Experience
from megarlhf.observe.metrics import Metric
from megarlhf.parallel.step import StepResult
from megarlhf.rollout.engine import sample_seed
from megarlhf.trainers.bad_steps import Update
from megarlhf.trainers.rl_batches import micro_batches, split_into_mini_batches
from megarlhf.trainers.rl_components import Components
from megarlhf.trainers.rl_losses import PolicyLoss, ValueLoss

Metrics = dict[str, Metric]


class AtBorder(Protocol):
    """Called after an update of a step; `last`: after its last one."""

    def __call__(self, work: StepInProgress, last: bool) -> None: ...


def mini_batches_of_pass(cfg: RLConfig, experience: Experience, step: int, number: int) -> list[list[int]]:
    """The mini-batches of one pass over the step's samples."""
    return split_into_mini_batches(
        experience.num_samples,
        cfg.train.mini_batch_samples,
        shuffle=cfg.train.shuffle,
        seed=sample_seed(cfg.run.seed, step, -2 - number),
    )


@dataclass
class StepInProgress:
    """A step whose samples are ready to be trained on: what a resume point inside a step holds."""

    experience: Experience
    found: Mapping[str, float]
    """Metrics of the step so far."""
    per_update: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    """Metrics of the updates made; None where one was skipped."""
    updates: int = 0

    def table(self) -> dict[str, Any]:
        """For a resume point."""
        per_update = {name: list(values) for name, values in self.per_update.items()}
        return {
            "experience": self.experience.state_dict(),
            "found": dict(self.found),
            "per_update": per_update,
            "updates": self.updates,
        }

    def note(self, result: StepResult, values: Mapping[str, float]) -> None:
        """Take down the metrics of an optimizer step, or that it was skipped."""
        self.per_update["skipped"].append(float(bool(result.skipped)))
        for name, value in values.items():
            self.per_update[name].append(None if result.skipped else value)

    @classmethod
    def restored(cls, table: Mapping[str, Any] | None) -> StepInProgress | None:
        """From what `table` returned; None from nothing."""
        if table is None:
            return None
        per_update: dict[str, list[float | None]] = defaultdict(list, table["per_update"])
        return cls(Experience.from_state_dict(table["experience"]), table["found"], per_update, table["updates"])


def train_on(
    cfg: RLConfig,
    components: Components,
    work: StepInProgress,
    step: int,
    at_border: AtBorder = lambda work, last: None,
) -> Metrics:
    """Every pass over the step's samples, one optimizer step per mini-batch; those that a resumed step has made are not
    made again. `at_border` is called after each. Means over mini-batches."""
    actor, critic, phases = components.actor, components.critic, components.phases
    experience, bad_steps = work.experience, components.bad_steps
    passes = [mini_batches_of_pass(cfg, experience, step, number) for number in range(cfg.train.epochs_per_step)]
    updates = list(itertools.chain.from_iterable(passes))
    policy_columns = ("old_logprobs", "ref_logprobs", "advantages")
    for samples in updates[work.updates :]:
        update = Update(step + 1, work.updates, samples)
        tokens = int(experience.response_lengths_N[samples].sum())
        if step >= cfg.train.critic_warmup_steps or critic is None:
            loss = PolicyLoss(
                algo=cfg.algo,
                temperature=cfg.rollout.temperature,
                response_tokens=tokens,
                sequences=len(samples),
                vocabulary=actor.shard.vocabulary(),
            )
            with phases("train/actor"):
                batches = micro_batches(actor, experience, samples, cfg.train, policy_columns)
                sums = actor.accumulate(batches, loss)
            result = bad_steps["actor"].apply(actor, sums, update, batches, loss)
            values = {name: sums[name] for name in ("policy_loss", "loss")}
            values |= {"clip_fraction": sums["clipped"] / tokens, "actor_grad_norm": result.grad_norm}
            work.note(result, values | {name: sums[name] / tokens for name in ("entropy", "ratio_deviation")})
        if critic is not None:
            value_loss = ValueLoss(clip=cfg.algo.value_clip, response_tokens=tokens)
            with phases("train/critic"):
                batches = micro_batches(critic, experience, samples, cfg.train, ("values", "returns"))
                sums = critic.accumulate(batches, value_loss)
            result = bad_steps["critic"].apply(critic, sums, update, batches, value_loss)
            work.note(result, {"value_loss": sums["loss"], "critic_grad_norm": result.grad_norm})
        work.updates += 1
        at_border(work, last=work.updates == len(updates))
    metrics: Metrics = {name: mean_of(each) for name, each in work.per_update.items() if name != "skipped"}
    metrics["skipped_steps"] = round(sum(filter(None, work.per_update["skipped"])))
    if work.per_update["ratio_deviation"]:
        metrics["first_ratio_deviation"] = work.per_update["ratio_deviation"][0]
    return metrics


def mean_of(values: Sequence[float | None]) -> float | None:
    """Of those that there are; None where there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
