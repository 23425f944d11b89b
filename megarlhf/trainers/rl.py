"""PPO, GRPO and their relatives: one loop; `algo` and `rewards` say which.

Generate, score, advantages, train, update weights. Every rank runs every line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from megarlhf.algo.kl import kl_estimate
from megarlhf.architectures.placements import Head
from megarlhf.config import RLConfig
from megarlhf.data.loader import ShuffledBatches
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience import Experience, Ragged
from megarlhf.models.role import Role, build_role
from megarlhf.observe.phases import Phases, seconds_of
from megarlhf.observe.watchdog import watched_phases
from megarlhf.parallel.mesh import GroupCache
from megarlhf.planning.anchor import anchor_notes
from megarlhf.resume.claim import NO_STEPS_LEFT
from megarlhf.resume.identity import (
    architecture_of,
    digest_of_samples,
    digest_of_vocabulary,
    digest_of_weights,
    identity_of_weights,
)
from megarlhf.resume.signals import StopRequest, StopRun
from megarlhf.resume.state import Stateful
from megarlhf.rollout.bank import Bank
from megarlhf.rollout.engine import RolloutEngine, sample_seed
from megarlhf.rollout.rewards.rules import sources_of_rules
from megarlhf.runtime import Runtime
from megarlhf.trainers.bad_steps import BadSteps, Failures
from megarlhf.trainers.prompts import PromptData, load_prompts, make_engine, mesh_orders, sampling_of
from megarlhf.trainers.rl_components import Components
from megarlhf.trainers.rl_eval import Evaluator, StopRule
from megarlhf.trainers.rl_gap import LogprobGapWatch, logprob_gap
from megarlhf.trainers.rl_rollout import sample_or_keep
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
    with (
        StopRequest(device=runtime.device, speaks=runtime.is_main) as stop,
        watched_phases(cfg.watchdog, cfg.run.dir, runtime) as phases,
    ):
        run_in(phases, stop, cfg, runtime)


def run_in(phases: Phases, stop_request: StopRequest, cfg: RLConfig, runtime: Runtime) -> None:
    """The loop, from where the run is to its last step."""
    with phases("build"):
        data = load_prompts(cfg.data, cfg.actor.model.hf_directory(), cfg.rewards, cfg.eval.max_samples)
        order = ShuffledBatches(len(data.train), cfg.train.prompts_per_step, cfg.run.seed, "train.prompts_per_step")
        components = build(cfg, runtime, data.tokenizer, phases)
        evaluate = Evaluator(cfg, components.engine, components.rewarder, data.heldout)
        stop = StopRule(cfg.train.stop)
        gap = LogprobGapWatch(cfg.rollout.logprob_gap, components.actor.shard.dtype)
        bank = Bank(cfg.run.dir / "bank")
        states: dict[str, Stateful] = {"stop": stop, "logprob_gap": gap, "order": order}
        training = training_of(cfg, components, data, states, bank, stop_request)
        assert training.reference is not None
        notes = [*data.notes, *anchor_notes(cfg, training.reference)]
    with (
        closed_at_the_end(components.engine),
        open_session(cfg, cfg.run, runtime, "rl", cfg.train.num_steps, notes, training, phases=phases) as session,
    ):
        step = session.start.step
        update_weights(components, step, certify=True)
        if not session.resumed:
            with session.stoppable("eval"):
                evaluation = stop.watch(evaluate(session.asked_to_stop))
            session.log(0, evaluation)
            session.border(0)
        if not session.start.update:  # the run had ended there; a step in progress is completed and exported first
            gap.raise_if_failed(last=step == cfg.train.num_steps)
        phases.lap()
        while step < cfg.train.num_steps and stop.reason is None:
            rebuilds = components.engine.rebuilds
            work = StepInProgress.restored(session.take_table())
            if work is None:
                prompts = [data.train[n] for n in order.indices(step)]
                with session.stoppable("rollout"):
                    experience = sample_or_keep(cfg, components, prompts, step, bank, session)
                experience = score(cfg, components, experience, prompts, step, session)
                with phases("advantages"), phases.local():
                    found = gap.watch(logprob_gap(experience))
                    work = StepInProgress(add_advantages(experience, cfg.algo), found)
            described = describe(work.experience, cfg)
            metrics: Metrics = {**work.found, **described}
            metrics |= train_on(cfg, components, work, step, partial(at_border, session, step))
            step += 1
            session.stop_if_asked()
            update_weights(components, step, certify=step == 1 or is_due(step, cfg.rollout.verify_weights_every))
            last = stop.over(described["kl"]) or step == cfg.train.num_steps
            if (due := is_due(step, cfg.eval.every)) or last:
                with session.stoppable("eval"):
                    evaluation = evaluate(session.asked_to_stop)
                metrics |= stop.watch(evaluation) if due else evaluation
                last = stop.over(described["kl"]) or last
            if components.engine.rebuilds > rebuilds:
                metrics["engine_rebuilds"] = components.engine.rebuilds - rebuilds
            session.log(step, metrics | seconds_of(phases.end_step(step)))
            session.export(step, components.trained, last=last or gap.failed(last=last))
            session.border(step)
            gap.raise_if_failed(last=last)
        session.finish(step, stop.reason or NO_STEPS_LEFT, stop.reason or f"all {cfg.train.num_steps} steps done")
        if not cfg.checkpoint.by_cadence:
            bank.forget_before(step)  # a finished run without resume points does not go on


def training_of(
    cfg: RLConfig,
    components: Components,
    data: PromptData,
    states: Mapping[str, Stateful],
    bank: Bank,
    stop: StopRequest,
) -> Training:
    """What is saved of the run, and what it is recognised by. Collective."""
    others = {
        "tokens that end a response": str(sorted(components.sampling.end_ids)),
        "the actor's tokenizer": digest_of_vocabulary(data.tokenizer),
    }
    built = [components.actor, components.reference, components.critic, components.rewarder.reward_model]
    if (scorer := components.rewarder.reward_model) is not None:
        others["weights of the reward model"] = digest_of_weights(scorer)
    if cfg.train.stop.heldout_reward_patience is not None:
        others["data.heldout (decides when the run ends)"] = digest_of_samples(data.heldout)
    skipped = {f"bad_steps/{name}": bad_steps for name, bad_steps in components.bad_steps.items()}
    return Training(
        cfg.checkpoint,
        components.trained,
        stop,
        data=digest_of_samples(data.train),
        states={**states, **skipped},
        base={role.name: identity_of_weights(role) for role in components.trained},
        reference=identity_of_weights(components.reference),
        architectures={role.name: architecture_of(role) for role in built if role is not None},
        others=others,
        sources=sources_of_rules(cfg.rewards),
        on_saved=lambda oldest: bank.forget_before(oldest.step),
    )


def update_weights(components: Components, version: int, *, certify: bool) -> None:
    """Give the engine the actor's weights as those of `version`, with a proof that it has them where one is due."""
    engine, actor, phases = components.engine, components.actor.shard, components.phases
    with phases("reshard"):
        engine.update_weights(actor, version=version)
    if certify:
        with phases("certificate"):
            engine.verify_weights(actor)


@contextlib.contextmanager
def closed_at_the_end(engine: RolloutEngine) -> Iterator[None]:
    """Close the engine when the run ends in order, all ranks alike; not after a failure (`RolloutEngine.close`)."""
    try:
        yield
    except StopRun:
        engine.close()
        raise
    engine.close()


def at_border(session: Session, step: int, work: StepInProgress, last: bool) -> None:
    """After an update of a step. After the last one a point is written only where the run is asked to stop before the
    step is complete: what is left of it, such as its evaluation, is then done after the resume."""
    session.border(step, work.updates, work.table(), only_to_stop=last)


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
    failures = Failures.of(cfg, "rl")
    bad_steps = {each.name: BadSteps(cfg.train, failures, phases) for each in (actor, critic) if each}
    return Components(actor, reference, critic, engine, rewarder, sampling, phases, bad_steps)


def score(
    cfg: RLConfig,
    components: Components,
    experience: Experience,
    prompts: Sequence[PromptSample],
    step: int,
    session: Session,
) -> Experience:
    """Old and reference log-probs, values and rewards.

    The forwards run on the micro-batches that the first pass will train on, so that its first ratio is 1.
    """
    micro, temperature = cfg.train, cfg.rollout.temperature
    mini_batches = mini_batches_of_pass(cfg, experience, step, 0)
    columns: dict[str, Ragged] = {}
    for name, role in (("old_logprobs", components.actor), ("ref_logprobs", components.reference)):
        with session.stoppable(f"score/{role.name}"):
            columns[name] = policy_logprobs(role, experience, mini_batches, micro, temperature=temperature)
    if components.critic is not None:
        with session.stoppable("score/critic"):
            columns["values"] = values_of(components.critic, experience, mini_batches, micro)
    per_prompt = cfg.rollout.num_samples_per_prompt
    repeated = [prompt for prompt in prompts for _ in range(per_prompt)]
    with session.stoppable("reward"):
        rewards_N = components.rewarder(experience, repeated, session.asked_to_stop)
    if cfg.algo.shuffle_rewards:
        generator = torch.Generator().manual_seed(sample_seed(cfg.run.seed, step, -1))
        rewards_N = rewards_N[torch.randperm(len(rewards_N), generator=generator).to(rewards_N.device)]
    return experience.with_columns(columns).with_per_sample({"rewards": rewards_N})


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
