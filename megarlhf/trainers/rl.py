"""PPO, GRPO and their relatives: one loop; `algo` and `rewards` say which.

Generate, score, advantages, train, update weights. Every rank runs every line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
from megarlhf.resume.signals import StopRun
from megarlhf.rollout.bank import Bank
from megarlhf.rollout.engine import RolloutEngine, Sampling, sample_seed
from megarlhf.runtime import Runtime
from megarlhf.trainers.prompts import load_prompts, make_engine, mesh_orders, sampling_of
from megarlhf.trainers.rl_eval import Evaluator, StopRule
from megarlhf.trainers.rl_gap import LogprobGapWatch, logprob_gap
from megarlhf.trainers.rl_rollout import sample_or_stop
from megarlhf.trainers.rl_score import (
    Rewarder,
    add_advantages,
    policy_logprobs,
    values_of,
)
from megarlhf.trainers.rl_updates import Metrics, StepInProgress, mini_batches_of_pass, train_on
from megarlhf.trainers.session import Session, Training, is_due, open_session


def run(cfg: RLConfig, runtime: Runtime) -> None:
    """Improve the actor on its own samples."""
    data = load_prompts(cfg.data, cfg.actor.model.hf_directory(), cfg.rewards, cfg.eval.max_samples)
    order = ShuffledBatches(len(data.train), cfg.train.prompts_per_step, cfg.run.seed, "train.prompts_per_step")
    components = build(cfg, runtime, data.tokenizer)
    evaluate = Evaluator(cfg, components.engine, components.rewarder, data.heldout)
    stop = StopRule(cfg.train.stop)
    gap = LogprobGapWatch(cfg.rollout.logprob_gap, components.actor.shard.dtype)
    bank = Bank(cfg.run.dir / "bank")
    training = Training(
        cfg.checkpoint,
        components.trained,
        data=digest_of_samples(data.train),
        states={"stop": stop, "logprob_gap": gap},
        reference=digest_of_weights(components.reference),
        on_saved=lambda oldest: bank.forget_before(oldest.step),
    )
    with (
        closed_at_the_end(components.engine),
        open_session(cfg, cfg.run, runtime, "rl", cfg.train.num_steps, data.notes, training) as session,
    ):
        components.engine.update_weights(components.actor.shard, version=session.start.step)
        components.engine.verify_weights(components.actor.shard)
        if not session.resumed:
            session.log(0, stop.watch(evaluate()))
            session.border(0)
        step = session.start.step
        while step < cfg.train.num_steps and stop.reason is None:
            clock, rebuilds_before = Stopwatch(), components.engine.rebuilds
            work = StepInProgress.restored(session.take_table())
            if work is None:
                prompts = [data.train[n] for n in order.indices(step)]
                experience = sample_or_stop(cfg, components.engine, prompts, components.sampling, step, bank, session)
                clock.lap("seconds_rollout")
                experience = score(cfg, components, experience, prompts, step)
                found = gap.watch(logprob_gap(experience))
                work = StepInProgress(add_advantages(experience, cfg.algo), found)
                clock.lap("seconds_experience")
            metrics = (
                work.found
                | describe(work.experience, cfg)
                | train_on(cfg, components.actor, components.critic, work, step, partial(at_border, session, step))
            )
            clock.lap("seconds_train")
            components.engine.update_weights(components.actor.shard, version=step + 1)
            clock.lap("seconds_reshard")
            if step == 0 or is_due(step + 1, cfg.rollout.verify_weights_every):
                components.engine.verify_weights(components.actor.shard)
                clock.lap("seconds_certificate")
            if rebuilds := components.engine.rebuilds - rebuilds_before:
                metrics["engine_rebuilds"] = rebuilds
            step, metrics = step + 1, metrics | clock.laps
            last = stop.over(metrics["kl"]) or step == cfg.train.num_steps
            if last or is_due(step, cfg.eval.every):
                metrics |= stop.watch(evaluate())
                last = stop.over(metrics["kl"]) or last
            session.log(step, metrics)
            session.export(step, components.trained, last=last or gap.failed(last=last))
            session.border(step)
            gap.raise_if_failed(last=last)
        bank.forget_before(step)
        session.finish(step, stop.reason or NO_STEPS_LEFT, stop.reason or f"all {cfg.train.num_steps} steps done")


@contextlib.contextmanager
def closed_at_the_end(engine: RolloutEngine) -> Iterator[None]:
    """Close the engine when the run ends in order, all ranks alike; not after a failure (`RolloutEngine.close`)."""
    try:
        yield
    except StopRun:
        engine.close()
        raise
    engine.close()


def at_border(session: Session, step: int, work: StepInProgress) -> None:
    """Between two updates of a step."""
    session.border(step, work.updates, work.table())


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
