"""PPO, GRPO and their relatives: one loop; `algo` and `rewards` say which.

Generate, score, advantages, train, update weights. Every rank runs every line.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megarlhf.algo.kl import kl_estimate
from megarlhf.architectures.placements import Head
from megarlhf.config import RLConfig
from megarlhf.data.loader import ShuffledBatches
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience import Experience, Ragged
from megarlhf.models.role import Role, build_role
from megarlhf.observe.metrics import Metric
from megarlhf.observe.phases import Phases, seconds_of
from megarlhf.observe.watchdog import watched_phases
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.step import StepResult
from megarlhf.rollout.engine import RolloutEngine, Sampling, sample_seed
from megarlhf.runtime import Runtime
from megarlhf.trainers.bad_steps import BadSteps, Update
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
from megarlhf.trainers.session import is_due, open_session

Metrics = dict[str, Metric]


def run(cfg: RLConfig, runtime: Runtime) -> None:
    """Improve the actor on its own samples."""
    with watched_phases(cfg.watchdog, cfg.run.dir, runtime) as phases:
        run_in(phases, cfg, runtime)


def run_in(phases: Phases, cfg: RLConfig, runtime: Runtime) -> None:
    """The loop."""
    with phases("build"):
        data = load_prompts(cfg.data, cfg.actor.model.hf_directory(), cfg.rewards, cfg.eval.max_samples)
        order = ShuffledBatches(len(data.train), cfg.train.prompts_per_step, cfg.run.seed, "train.prompts_per_step")
        components = build(cfg, runtime, data.tokenizer, phases)
        components.engine.update_weights(components.actor.shard, version=0)
        components.engine.verify_weights(components.actor.shard)
    with open_session(cfg, cfg.run, cfg.checkpoint, runtime, "rl", cfg.train.num_steps, data.notes) as session:
        evaluate = Evaluator(cfg, components.engine, components.rewarder, data.heldout)
        stop = StopRule(cfg.train.stop)
        gap = LogprobGapWatch(cfg.rollout.logprob_gap, components.actor.shard.dtype)
        with phases("eval"):
            evaluation = stop.watch(evaluate())
        session.log(0, evaluation)
        phases.lap()
        for step in range(cfg.train.num_steps):
            prompts = [data.train[n] for n in order.indices(step)]
            with phases("rollout"):
                experience = sample(cfg, components.engine, prompts, components.sampling, step)
                phases.add_local(components.engine.local_seconds)
            experience, mini_batches = score(cfg, components, experience, prompts, step)
            with phases("advantages"), phases.local():
                metrics: Metrics = {**gap.watch(logprob_gap(experience))}
                experience = add_advantages(experience, cfg.algo)
            described = describe(experience, cfg)
            metrics |= {**described, **train_on(cfg, components, experience, mini_batches, step)}
            with phases("reshard"):
                components.engine.update_weights(components.actor.shard, version=step + 1)
            if step == 0 or is_due(step + 1, cfg.rollout.verify_weights_every):
                with phases("certificate"):
                    components.engine.verify_weights(components.actor.shard)
            last = step + 1 == cfg.train.num_steps or stop.over(described["kl"])
            if last or is_due(step + 1, cfg.eval.every):
                with phases("eval"):
                    metrics |= stop.watch(evaluate())
                last = last or stop.over(described["kl"])
            session.log(step + 1, metrics | seconds_of(phases.end_step(step + 1)))
            with phases("checkpoint"):
                session.maybe_save(step + 1, components.trained, last=last or gap.failed(last=last))
            gap.raise_if_failed(last=last)
            if last:
                session.note(stop.reason or f"all {cfg.train.num_steps} steps done")
                break
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
    phases: Phases
    bad_steps: Mapping[str, BadSteps]
    """By trained role."""

    @property
    def trained(self) -> list[Role]:
        return [role for role in (self.actor, self.critic) if role is not None]


def build(cfg: RLConfig, runtime: Runtime, tokenizer: Tokenizer, phases: Phases) -> Components:
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
    rewarder = Rewarder(cfg.rewards, reward_model, tokenizer, cfg.train, runtime.device, phases)
    sampling = sampling_of(cfg.rollout, cfg.actor, tokenizer)
    trained = [each for each in (actor, critic) if each is not None]
    bad_steps = {each.name: BadSteps(cfg.train, cfg.run.dir / "failures") for each in trained}
    return Components(actor, reference, critic, engine, rewarder, sampling, phases, bad_steps)


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
) -> tuple[Experience, list[list[int]]]:
    """Old and reference log-probs, values and rewards; and the mini-batches of the first pass.

    The forwards run on the micro-batches that the first pass will train on, so that its first ratio is 1.
    """
    micro, temperature, phases = cfg.train, cfg.rollout.temperature, components.phases
    mini_batches = mini_batches_of_pass(cfg, experience, step, 0)
    columns: dict[str, Ragged] = {}
    for name, role in (("old_logprobs", components.actor), ("ref_logprobs", components.reference)):
        with phases(f"score/{role.name}"):
            columns[name] = policy_logprobs(role, experience, mini_batches, micro, temperature=temperature)
    if components.critic is not None:
        with phases("score/critic"):
            columns["values"] = values_of(components.critic, experience, mini_batches, micro)
    per_prompt = cfg.rollout.num_samples_per_prompt
    with phases("reward"):
        rewards_N = components.rewarder(experience, [prompt for prompt in prompts for _ in range(per_prompt)])
    if cfg.algo.shuffle_rewards:
        generator = torch.Generator().manual_seed(sample_seed(cfg.run.seed, step, -1))
        rewards_N = rewards_N[torch.randperm(len(rewards_N), generator=generator).to(rewards_N.device)]
    return experience.with_columns(columns).with_per_sample({"rewards": rewards_N}), mini_batches


def mini_batches_of_pass(cfg: RLConfig, experience: Experience, step: int, number: int) -> list[list[int]]:
    """The mini-batches of one pass over the step's samples."""
    return split_into_mini_batches(
        experience.num_samples,
        cfg.train.mini_batch_samples,
        shuffle=cfg.train.shuffle,
        seed=sample_seed(cfg.run.seed, step, -2 - number),
    )


def train_on(
    cfg: RLConfig, components: Components, experience: Experience, first_pass: list[list[int]], step: int
) -> Metrics:
    """Every pass over the step's samples, one optimizer step per mini-batch. Means over mini-batches."""
    per_mini_batch: dict[str, list[float | None]] = defaultdict(list)
    phases, bad_steps, skipped = components.phases, components.bad_steps, 0

    def note(result: StepResult, values: Metrics) -> int:
        for name, value in values.items():
            per_mini_batch[name].append(None if result.skipped else value)
        return int(bool(result.skipped))

    passes = [
        first_pass,
        *(mini_batches_of_pass(cfg, experience, step, n) for n in range(1, cfg.train.epochs_per_step)),
    ]
    policy_columns = ("old_logprobs", "ref_logprobs", "advantages")
    for number, samples in enumerate(itertools.chain.from_iterable(passes)):
        update = Update(step + 1, number, samples)
        tokens = int(experience.response_lengths_N[samples].sum())
        if step >= cfg.train.critic_warmup_steps or components.critic is None:
            loss = PolicyLoss(
                algo=cfg.algo,
                temperature=cfg.rollout.temperature,
                response_tokens=tokens,
                sequences=len(samples),
                vocabulary=components.actor.shard.vocabulary(),
            )
            with phases("train/actor"):
                batches = micro_batches(components.actor, experience, samples, cfg.train, policy_columns)
                sums = components.actor.accumulate(batches, loss)
            with phases("optimizer/actor"):
                result = bad_steps["actor"].apply(components.actor, sums, update, batches)
            values: Metrics = {name: sums[name] for name in ("policy_loss", "loss")}
            values |= {"clip_fraction": sums["clipped"] / tokens, "actor_grad_norm": result.grad_norm}
            values |= {name: sums[name] / tokens for name in ("entropy", "ratio_deviation")}
            skipped += note(result, values)
        if components.critic is not None:
            with phases("train/critic"):
                batches = micro_batches(components.critic, experience, samples, cfg.train, ("values", "returns"))
                value_loss = ValueLoss(clip=cfg.algo.value_clip, response_tokens=tokens)
                sums = components.critic.accumulate(batches, value_loss)
            with phases("optimizer/critic"):
                result = bad_steps["critic"].apply(components.critic, sums, update, batches)
            skipped += note(result, {"value_loss": sums["loss"], "critic_grad_norm": result.grad_norm})
    metrics: Metrics = {name: mean_of(values) for name, values in per_mini_batch.items()}
    if per_mini_batch["ratio_deviation"]:
        metrics["first_ratio_deviation"] = per_mini_batch["ratio_deviation"][0]
    return metrics | {"skipped_steps": skipped}


def mean_of(values: Sequence[float | None]) -> float | None:
    """Of those that there are; None where there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def describe(experience: Experience, cfg: RLConfig) -> dict[str, float]:
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
