"""PPO, GRPO and their relatives: one loop; `algo` and `rewards` say which.

Generate, score, advantages, train, update weights. Every rank runs every line.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarlhf.algo.kl import kl_estimate
from megarlhf.architectures.placements import Head
from megarlhf.config import RLConfig
from megarlhf.data.loader import ShuffledBatches
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience import Experience
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.claim import NO_STEPS_LEFT
from megarlhf.resume.identity import digest_of_samples, digest_of_weights
from megarlhf.rollout.engine import RolloutEngine, Sampling, sample_seed
from megarlhf.runtime import Runtime
from megarlhf.trainers.prompts import load_prompts, make_engine, mesh_orders, sampling_of
from megarlhf.trainers.rl_batches import micro_batches, split_into_mini_batches
from megarlhf.trainers.rl_eval import Evaluator, StopRule
from megarlhf.trainers.rl_gap import LogprobGapWatch, logprob_gap
from megarlhf.trainers.rl_losses import PolicyLoss, ValueLoss
from megarlhf.trainers.rl_score import (
    Rewarder,
    add_advantages,
    make_experience,
    policy_logprobs,
    values_of,
)
from megarlhf.trainers.session import Session, Training, is_due, open_session

Metrics = dict[str, float]


def run(cfg: RLConfig, runtime: Runtime) -> None:
    """Improve the actor on its own samples."""
    data = load_prompts(cfg.data, cfg.actor.model.hf_directory(), cfg.rewards, cfg.eval.max_samples)
    order = ShuffledBatches(len(data.train), cfg.train.prompts_per_step, cfg.run.seed, "train.prompts_per_step")
    components = build(cfg, runtime, data.tokenizer)
    evaluate = Evaluator(cfg, components.engine, components.rewarder, data.heldout)
    stop = StopRule(cfg.train.stop)
    gap = LogprobGapWatch(cfg.rollout.logprob_gap, components.actor.shard.dtype)
    training = Training(
        cfg.checkpoint,
        components.trained,
        data=digest_of_samples(data.train),
        states={"stop": stop, "logprob_gap": gap},
        reference=digest_of_weights(components.reference),
    )
    with open_session(cfg, cfg.run, runtime, "rl", cfg.train.num_steps, data.notes, training) as session:
        components.engine.update_weights(components.actor.shard, version=session.start.step)
        components.engine.verify_weights(components.actor.shard)
        if not session.resumed:
            session.log(0, stop.watch(evaluate()))
            session.border(0)
        step = session.start.step
        while step < cfg.train.num_steps and stop.reason is None:
            clock = Stopwatch()
            work = StepInProgress.restored(session.take_table())
            if work is None:
                prompts = [data.train[n] for n in order.indices(step)]
                experience = sample(cfg, components.engine, prompts, components.sampling, step)
                clock.lap("seconds_rollout")
                experience = score(cfg, components, experience, prompts, step)
                found = gap.watch(logprob_gap(experience))
                work = StepInProgress(add_advantages(experience, cfg.algo), found)
                clock.lap("seconds_experience")
            metrics = work.found | describe(work.experience, cfg) | train_on(cfg, components, work, step, session)
            clock.lap("seconds_train")
            components.engine.update_weights(components.actor.shard, version=step + 1)
            clock.lap("seconds_reshard")
            if step == 0 or is_due(step + 1, cfg.rollout.verify_weights_every):
                components.engine.verify_weights(components.actor.shard)
                clock.lap("seconds_certificate")
            step, metrics = step + 1, metrics | clock.laps
            last = stop.over(metrics["kl"]) or step == cfg.train.num_steps
            if last or is_due(step, cfg.eval.every):
                metrics |= stop.watch(evaluate())
                last = stop.over(metrics["kl"]) or last
            session.log(step, metrics)
            session.export(step, components.trained, last=last or gap.failed(last=last))
            session.border(step)
            gap.raise_if_failed(last=last)
        session.finish(step, stop.reason or NO_STEPS_LEFT, stop.reason or f"all {cfg.train.num_steps} steps done")
    components.engine.close()


@dataclass(frozen=True)
class Components:
    """What a run is made of."""

    actor: Role
    reference: Role
    critic: Role | None
    engine: RolloutEngine
    rewarder: Rewarder
    sampling: Sampling

    @property
    def trained(self) -> list[Role]:
        return [role for role in (self.actor, self.critic) if role is not None]


def build(cfg: RLConfig, runtime: Runtime, tokenizer: Tokenizer) -> Components:
    """The roles that this configuration needs, and the engine."""
    cache, sections, seed = GroupCache(runtime), cfg.roles(), cfg.run.seed
    orders = mesh_orders(cfg.rollout, sections, runtime)

    def role(name: str, head: Head, *, trained: bool = False) -> Role:
        steps = cfg.optimizer_steps(name) if trained else None
        return build_role(name, sections[name], head, cache, seed=seed, num_optimizer_steps=steps, order=orders[name])

    actor, reference = role("actor", "lm", trained=True), role("reference", "lm")
    critic = role("critic", "scalar", trained=True) if "critic" in sections else None
    reward_model = role("reward_model", "scalar") if "reward_model" in sections else None
    rows = cfg.train.rows(cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens)
    engine = make_engine(cfg.rollout, actor, cfg.data.max_prompt_tokens, rows)
    rewarder = Rewarder(cfg.rewards, reward_model, tokenizer, cfg.train, runtime.device)
    return Components(actor, reference, critic, engine, rewarder, sampling_of(cfg.rollout, cfg.actor, tokenizer))


def sample(
    cfg: RLConfig, engine: RolloutEngine, prompts: Sequence[PromptSample], sampling: Sampling, step: int
) -> Experience:
    """Draw num_samples_per_prompt responses to each prompt."""
    per_prompt = cfg.rollout.num_samples_per_prompt
    rows = [torch.tensor(prompt.tokens) for prompt in prompts for _ in range(per_prompt)]
    seeds = [sample_seed(cfg.run.seed, step, n) for n in range(len(rows))]
    rollouts = engine.generate(rows, seeds, sampling)
    assert rollouts.weight_version == step, "the engine sampled with other weights than this step's"
    return make_experience(prompts, rollouts, per_prompt)


def score(
    cfg: RLConfig, components: Components, experience: Experience, prompts: Sequence[PromptSample], step: int
) -> Experience:
    """Old and reference log-probs, values and rewards.

    The forwards run on the micro-batches that the first pass will train on, so that its first ratio is 1.
    """
    micro, temperature = cfg.train, cfg.rollout.temperature
    mini_batches = mini_batches_of_pass(cfg, experience, step, 0)
    columns = {
        "old_logprobs": policy_logprobs(components.actor, experience, mini_batches, micro, temperature=temperature),
        "ref_logprobs": policy_logprobs(components.reference, experience, mini_batches, micro, temperature=temperature),
    }
    if components.critic is not None:
        columns["values"] = values_of(components.critic, experience, mini_batches, micro)
    per_prompt = cfg.rollout.num_samples_per_prompt
    rewards_N = components.rewarder(experience, [prompt for prompt in prompts for _ in range(per_prompt)])
    if cfg.algo.shuffle_rewards:
        generator = torch.Generator().manual_seed(sample_seed(cfg.run.seed, step, -1))
        rewards_N = rewards_N[torch.randperm(len(rewards_N), generator=generator).to(rewards_N.device)]
    return experience.with_columns(columns).with_per_sample({"rewards": rewards_N})


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
    found: Metrics
    """Metrics of the step so far."""
    per_update: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Metrics of the updates made."""
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

    @classmethod
    def restored(cls, table: Mapping[str, Any] | None) -> StepInProgress | None:
        """From what `table` returned; None from nothing."""
        if table is None:
            return None
        per_update: dict[str, list[float]] = defaultdict(list, table["per_update"])
        return cls(Experience.from_state_dict(table["experience"]), table["found"], per_update, table["updates"])


def train_on(cfg: RLConfig, components: Components, work: StepInProgress, step: int, session: Session) -> Metrics:
    """Every pass over the step's samples, one optimizer step per mini-batch; those that a resumed step has made are not
    made again. Means over mini-batches."""
    experience, per_update = work.experience, work.per_update
    passes = [mini_batches_of_pass(cfg, experience, step, number) for number in range(cfg.train.epochs_per_step)]
    updates = list(itertools.chain.from_iterable(passes))
    policy_columns = ("old_logprobs", "ref_logprobs", "advantages")
    for samples in updates[work.updates :]:
        tokens = int(experience.response_lengths_N[samples].sum())
        if step >= cfg.train.critic_warmup_steps or components.critic is None:
            loss = PolicyLoss(
                algo=cfg.algo,
                temperature=cfg.rollout.temperature,
                response_tokens=tokens,
                sequences=len(samples),
                vocabulary=components.actor.shard.vocabulary(),
            )
            batches = micro_batches(components.actor, experience, samples, cfg.train, policy_columns)
            result = components.actor.train_step(batches, loss)
            per_update["policy_loss"].append(result.sums["policy_loss"])
            per_update["loss"].append(result.sums["loss"])
            per_update["clip_fraction"].append(result.sums["clipped"] / tokens)
            per_update["entropy"].append(result.sums["entropy"] / tokens)
            per_update["ratio_deviation"].append(result.sums["ratio_deviation"] / tokens)
            per_update["actor_grad_norm"].append(result.grad_norm)
        if components.critic is not None:
            batches = micro_batches(components.critic, experience, samples, cfg.train, ("values", "returns"))
            result = components.critic.train_step(batches, ValueLoss(clip=cfg.algo.value_clip, response_tokens=tokens))
            per_update["value_loss"].append(result.sums["loss"])
            per_update["critic_grad_norm"].append(result.grad_norm)
        work.updates += 1
        if work.updates < len(updates):
            session.border(step, work.updates, work.table())
    metrics = {name: sum(values) / len(values) for name, values in per_update.items()}
    if per_update["ratio_deviation"]:
        metrics["first_ratio_deviation"] = per_update["ratio_deviation"][0]
    return metrics


def describe(experience: Experience, cfg: RLConfig) -> Metrics:
    """What the step's samples were like."""
    old, ref = experience.columns["old_logprobs"], experience.columns["ref_logprobs"]
    lengths_N = experience.response_lengths_N
    metrics = {
        "reward_mean": float(experience.per_sample["rewards"].mean()),
        "kl": float(kl_estimate(old.values_T, ref.values_T, cfg.algo.kl.estimator).mean()),
        "response_length_mean": float(lengths_N.float().mean()),
        "finished_fraction": float(experience.rollouts.finished_N.float().mean()),
        "tokens": int(lengths_N.sum()),
    }
    if "returns" in experience.columns:
        metrics["value_mean"] = float(experience.columns["values"].values_T.mean())
    return metrics


class Stopwatch:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: Metrics = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
