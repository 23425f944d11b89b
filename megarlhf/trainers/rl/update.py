"""Updates of a step of rl: actor and critic are trained on the step's samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megarlhf.config import RLConfig, RLTrainConfig
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.observe.records.metrics import Metric
from megarlhf.parallel.loss import StepResult
from megarlhf.parallel.router_balance import ROUTER_AUX_LOSS
from megarlhf.rollout.responses import sample_seed
from megarlhf.trainers.experience.batches import loss_weights, micro_batches, per_token_of
from megarlhf.trainers.experience.plan import StepPlan, split_into_mini_batches
from megarlhf.trainers.rl.advantages import add_advantages, whiten_per_mini_batch
from megarlhf.trainers.rl.build import RLRun
from megarlhf.trainers.rl.logprob_gap import add_rollout_correction, logprob_gap, staleness
from megarlhf.trainers.rl.losses import PolicyLoss, ValueLoss
from megarlhf.trainers.run.skipped_steps import Update

Metrics = dict[str, Metric]

OF_UPDATES = {
    "actor": ("actor_grad_norm", "actor_learning_rate"),
    "critic": ("critic_grad_norm", "critic_learning_rate"),
}
"""Metrics of an update, by role."""

OF_PROMPTS = ("prompts_computed", "prompts_saved")
"""Metrics that are summed over the updates of a step: prompts in one pass over each mini-batch."""

POLICY_COLUMNS = ("old_logprobs", "ref_logprobs", "advantages", "rollout_weights", "rollout_logprobs")
"""Columns that the policy's loss reads where the experience has them."""


class UpdateCallback(Protocol):
    """Callback after each update of a step; `last`: it was the step's last."""

    def __call__(self, state: StepState, last: bool) -> None: ...


def plan_step(experience: Experience, train: RLTrainConfig, seed: int, step: int) -> StepPlan:
    """Plan of the passes over the step's samples, each with its own order. `seed`: seed of the run."""
    passes = [
        split_into_mini_batches(
            experience.prompt_numbers_N.tolist(),
            train.mini_batch_samples,
            shuffle=train.shuffle,
            seed=sample_seed(seed, step, -2 - epoch),
        )
        for epoch in range(train.epochs_per_step)
    ]
    return StepPlan(experience, train, passes)


@dataclass
class StepState:
    """A step whose samples are ready to be trained on. A resume point inside the step holds it."""

    experience: Experience
    plan: StepPlan
    metrics: Mapping[str, float]
    """Metrics of the step so far."""
    per_update: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    """Metrics of the updates so far; None for a skipped one."""
    updates: int = 0
    """Number of updates so far."""

    @classmethod
    def begin(
        cls,
        run: RLRun,
        experience: Experience,
        plan: StepPlan,
        rewards: Mapping[str, float],
        step: int = 0,
        *,
        first: bool = False,
    ) -> StepState:
        """Add advantages, and the correction for the rollout's numerics and age, to scored samples.

        rewards: metrics of the rewards and the rollout. first: whether this is the first step of this process
        """
        algo, kl = run.cfg.algo, run.kl
        state = cls(add_advantages(experience, algo, kl.coef, first=first), plan, {**kl.metrics(), **rewards})
        if "old_logprobs" in experience.columns:
            state.compare_with_rollout(run.cfg, step)
        return state

    def add_old_logprobs(
        self, role: Role, samples: Sequence[int], captured: Sequence[Tensor], cfg: RLConfig, step: int
    ) -> None:
        """Add the old log-probs that the policy's loss has captured in the step's only update, and compare them.

        captured: [B, S] of each micro-batch of the mini-batch `samples`
        """
        old_logprobs = per_token_of(role, self.experience, self.plan, [samples], captured)
        self.experience = self.experience.with_columns({"old_logprobs": old_logprobs})
        self.compare_with_rollout(cfg, step)

    def compare_with_rollout(self, cfg: RLConfig, step: int) -> None:
        """Measure how the old log-probs differ from the engine's, and add the correction for it."""
        self.experience, correction_metrics = add_rollout_correction(self.experience, cfg.rollout_correction)
        is_stale = cfg.rollout.is_stale
        difference = staleness(self.experience, step) if is_stale else logprob_gap(self.experience)
        self.metrics = {**self.metrics, **difference, **correction_metrics}

    def table(self) -> Callable[[], dict[str, Any]]:
        """Function that makes the content of a resume point from the step as it is now. It is collective, since it
        gathers the columns."""
        experience, metrics, updates = self.experience, dict(self.metrics), self.updates
        per_update = {name: list(values) for name, values in self.per_update.items()}

        def content() -> dict[str, Any]:
            whole = experience.replicated().state_dict()
            return {"experience": whole, "found": metrics, "per_update": per_update, "updates": updates}

        return content

    @classmethod
    def restored(cls, cfg: RLConfig, table: Mapping[str, Any], step: int) -> StepState:
        """State from the content of a resume point."""
        experience = Experience.from_state_dict(table["experience"])
        per_update: dict[str, list[float | None]] = defaultdict(list, table["per_update"])
        plan = plan_step(experience, cfg.train, cfg.run.seed, step)
        return cls(experience, plan, table["found"], per_update, table["updates"])

    def note(self, result: StepResult, values: Mapping[str, float]) -> None:
        """Record the metrics of an optimizer step, or that it was skipped."""
        self.per_update["skipped"].append(float(bool(result.skipped)))
        for name, value in values.items():
            self.per_update[name].append(None if result.skipped else value)

    def moved_beyond(self, limit: float | None) -> bool:
        """Whether the KL of old to new policy was above the limit in an update of this step."""
        return limit is not None and any(kl is not None and kl > limit for kl in self.per_update["policy_kl"])


def train_on(run: RLRun, state: StepState, step: int, on_update: UpdateCallback = lambda state, last: None) -> Metrics:
    """Train on every pass over the step's samples, with one optimizer step per mini-batch. Updates made before a resume
    are skipped. `on_update` is called after each update. Returns means over mini-batches."""
    updates = state.plan.updates
    for samples in updates[state.updates :]:
        for name, count in state.plan.prompts_computed(run.trained[0], samples).items():
            state.per_update[name].append(count)
        for learner in learners(run, state.experience, samples, step):
            if learner.role is run.actor and state.moved_beyond(run.cfg.train.max_policy_kl):
                continue
            update_role(run, state, learner, Update(step, state.updates, samples), step * len(updates))
        run.phases.count("tokens_per_second", float(state.experience.sequences.lengths_N[list(samples)].sum()))
        state.updates += 1
        on_update(state, last=state.updates == len(updates))
    return metrics_of_updates(run.cfg, state, step)


def update_role(run: RLRun, state: StepState, learner: Learner, update: Update, updates_before: int) -> None:
    """Make one optimizer step of a role on a mini-batch. `updates_before`: number of updates in all earlier steps.

    If the old log-probs come from this forward, they are added to the state, and the mismatch with the engine is
    checked before the weights change.
    """
    role, loss, phases = learner.role, learner.loss, run.phases
    assert role.trainer is not None
    learning_rate = role.trainer.learning_rate
    with phases(f"train/{role.name}"):
        batches = micro_batches(
            role, learner.experience, state.plan, [update.samples], learner.columns, learner.weights_N
        )
        if run.ptx is not None and role is run.actor:
            batches, tokens = run.ptx.add_texts(role, run.cfg.train, updates_before + state.updates, batches)
            phases.count("tokens_per_second", float(tokens))
        accumulated = role.accumulate(batches, loss)
        sums = accumulated.sums
        if learner.captures_logprobs:
            state.add_old_logprobs(role, update.samples, accumulated.captured, run.cfg, update.step)
            if not run.cfg.rollout.is_stale:  # otherwise watched when the samples were drawn
                run.gap_guard.watch(state.metrics)
    result = run.step_guards[role.name].apply(role, sums, update, batches, loss)
    values = {name: sums[name] / per for name, per in loss.per.items()}
    if ROUTER_AUX_LOSS in sums:
        values[f"{role.name}_{ROUTER_AUX_LOSS}"] = sums[ROUTER_AUX_LOSS]
    if run.ema is not None and role is run.actor and not result.skipped:
        run.ema.update()
    state.note(result, values | dict(zip(OF_UPDATES[role.name], (result.grad_norm, learning_rate), strict=True)))


def metrics_of_updates(cfg: RLConfig, state: StepState, step: int) -> Metrics:
    """Means and counts over the updates of a step."""
    per_update = state.per_update
    metrics: Metrics = {name: _mean(values) for name, values in per_update.items() if name != "skipped"}
    metrics |= {name: round(sum(filter(None, per_update[name]))) for name in OF_PROMPTS}
    metrics["skipped_steps"] = round(sum(filter(None, per_update["skipped"])))
    if cfg.train.max_policy_kl is not None and per_update["policy_kl"]:
        metrics["actor_updates_left_out"] = len(state.plan.updates) - len(per_update["policy_kl"])
    if per_update["ratio_deviation"] and not cfg.old_logprobs_in_training(step):  # otherwise 0 by construction
        metrics["first_ratio_deviation"] = per_update["ratio_deviation"][0]
    return metrics


@dataclass(frozen=True)
class Learner:
    """A role that learns from a mini-batch, with its loss and the columns that the loss reads."""

    role: Role
    loss: PolicyLoss | ValueLoss
    columns: tuple[str, ...]
    weights_N: Tensor
    """Weight of each sample's tokens in the loss."""
    experience: Experience
    captures_logprobs: bool = False
    """Whether the loss captures the step's old log-probs."""


def learners(run: RLRun, experience: Experience, samples: Sequence[int], step: int) -> Iterator[Learner]:
    """Roles that learn from the mini-batch `samples`, in the order of their updates."""
    cfg, algo = run.cfg, run.cfg.algo
    tokens = max(1, int(experience.response_lengths_N[list(samples)].sum()))  # metrics are means over all of them
    if step >= cfg.train.critic_warmup_steps or run.critic is None:
        captures_logprobs = "old_logprobs" not in experience.columns
        loss = PolicyLoss(
            algo=algo.model_copy(update={"rollout_correction": cfg.rollout_correction}),
            corrects_all=cfg.rollout.is_stale,
            temperature=cfg.rollout.temperature,
            vocabulary=run.actor.shard.vocabulary(),
            response_tokens=tokens,
            kl_coef=run.kl.coef if algo.kl.placement == "loss" else 0.0,
            entropy_coef=algo.entropy_coef_at(step, cfg.train.num_steps),
            ptx_coef=0.0 if cfg.ptx is None else cfg.ptx.coef,
            captures_logprobs=captures_logprobs,
        )
        policy_experience = experience
        if captures_logprobs and cfg.rollout_correction.kind != "none":
            policy_experience = experience.with_columns({"rollout_logprobs": experience.rollout_logprobs})
        columns = tuple(name for name in POLICY_COLUMNS if name in policy_experience.columns)
        weights_N = loss_weights(
            policy_experience,
            samples,
            algo.loss_average,
            cfg.loss_constant,
            algo.loss_block_samples,
            count_left_out=algo.loss_counts_left_out,
        )
        whitened = whiten_per_mini_batch(policy_experience, samples, algo)
        yield Learner(run.actor, loss, columns, weights_N, whitened, captures_logprobs)
    if run.critic is not None:
        value_loss = ValueLoss(clip=algo.value_clip, response_tokens=tokens)
        weights_N = loss_weights(experience, samples, "token")
        yield Learner(run.critic, value_loss, ("values", "returns"), weights_N, experience)


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None without any."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
