"""The loop of PPO, GRPO and related algorithms. `algo` and `rewards` choose among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from megarlhf.config import RLConfig
from megarlhf.data.samples.order import describe_mixture
from megarlhf.observe.records.metrics import Metric
from megarlhf.planning.batch import passes_note, require_prompts, with_counted_steps
from megarlhf.planning.kl_reference import reference_notes
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRequest, StopRun
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.no_signal import signal_warning
from megarlhf.trainers.experience.prompts import load_prompts
from megarlhf.trainers.rl.build import RLRun, build, training_of
from megarlhf.trainers.rl.evaluation import Evaluation
from megarlhf.trainers.rl.metrics import conversation_lengths, describe, kl_by_sample
from megarlhf.trainers.rl.own_sampler import PromptOrder, order_of, tell
from megarlhf.trainers.rl.rollout import generate, slice_notes
from megarlhf.trainers.rl.sample_rows import step_samples, training_rows
from megarlhf.trainers.rl.scoring import score
from megarlhf.trainers.rl.update import Metrics, StepState, train_on
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.open_session import open_session
from megarlhf.trainers.run.session import Session, is_due


def run(cfg: RLConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Train the actor on its own samples."""
    with (
        StopRequest(device=runtime.device, announces=runtime.is_main) as stop_request,
        parts.phases(cfg.watchdog, cfg.profile, cfg.run.dir, runtime) as phases,
    ):
        with phases("build"):
            data = load_prompts(
                cfg.data,
                cfg.actor.model.tokenizer_place(),
                cfg.rewards,
                cfg.eval.max_samples,
                cfg.eval.accuracy,
                cfg.run.dir,
                cfg.environment,
            )
            cfg = with_counted_steps(cfg, len(data.train), cfg.train.prompts_per_step)
            order = order_of(cfg.train, cfg.run.seed, data.train)
            require_prompts(cfg, len(data.train))
            rl_run = build(cfg, runtime, data, phases, parts)
            evaluation = Evaluation(rl_run)
            states: dict[str, Stateful] = {"stop": evaluation.stop, order.name: order}
            training = training_of(rl_run, states, evaluation.best, stop_request, parts)
            mixture = describe_mixture(order, cfg.train.num_steps, cfg.data.train)
            passes = passes_note(cfg.train.num_steps, cfg.train.prompts_per_step, len(data.train))
            notes = [*data.notes, *(mixture or [passes]), *reference_notes(cfg.actor.model, training.reference)]
            notes += slice_notes(rl_run, runtime.world_size)
        with (
            contextlib.closing(rl_run.rewarder),
            contextlib.closing(evaluation),
            closed_at_the_end(rl_run.engine),
            open_session(cfg, cfg.run, runtime, "rl", cfg.train.num_steps, notes, training, phases=phases) as session,
        ):
            train(rl_run, session, order, evaluation)


def train(run: RLRun, session: Session, order: PromptOrder, evaluation: Evaluation) -> None:
    """Generate, score, advantages, train, update weights. Every rank runs every line."""
    cfg, gap_guard = run.cfg, run.gap_guard
    update_weights(run, session.step, verify=True)  # also after a resume
    if not session.resumed:
        session.log_start(evaluation.before_training(session))
    if not session.start.update:  # resumed between steps; an unfinished step is completed and exported first
        gap_guard.raise_if_failed(last=session.step == cfg.train.num_steps)
    while session.has_steps_left(cfg.train.num_steps, evaluation.stop_reason):
        step, number = session.begin_step()  # after `step` steps, with version `step` of the weights
        rebuilds = run.engine.rebuilds
        state = resumed_step(run, session) or begin_step(run, session, order, step)
        metrics = train_on(run, state, step, session.update_boundary)
        metrics = {**state.metrics, **describe(state.experience, cfg), **metrics}
        warn_without_signal(run, session, state, metrics)
        session.stop_if_asked()
        update_weights(run, number, verify=number == 1 or is_due(number, cfg.rollout.verify_weights_every))
        metrics |= evaluation.after_step(session, number, metrics["kl"])
        metrics |= follow_actor(run, number, state, metrics["kl"])
        if run.engine.rebuilds > rebuilds:
            metrics["engine_rebuilds"] = run.engine.rebuilds - rebuilds
        show_samples(run, session, state)
        tell(order, step, state.experience)
        last = evaluation.last
        seen = partial(step_samples, run, state.experience)
        last = last or gap_guard.failed(last=last)
        session.end_step(metrics, run.exported, last=last, best=evaluation.is_best, samples=seen)
        gap_guard.raise_if_failed(last=evaluation.last)
    if run.in_flight.num_tokens:
        session.note(f"{run.in_flight.num_tokens:,} tokens of samples of later steps are thrown away")
    session.finish(evaluation.stop_reason)
    if not cfg.checkpoint.by_cadence:
        run.bank.forget_before(session.step)  # a finished run without resume points does not go on


def begin_step(run: RLRun, session: Session, order: PromptOrder, step: int) -> StepState:
    """Rollout, rewards, log-probs, values and advantages of a step."""
    rollout = generate(run, session, order, step)  # refills, greedy baselines, slices of later steps too
    experience, plan, rewards = score(run, session, rollout, step)
    with run.phases("advantages"):
        state = StepState.begin(run, experience, plan, rewards, step, first=step == session.start.step)
        if run.cfg.rollout.is_stale or not run.cfg.old_logprobs_in_training(step):
            run.gap_guard.watch(state.metrics)
    return state


def resumed_step(run: RLRun, session: Session) -> StepState | None:
    """The unfinished step of a resumed run, if it was left inside one."""
    table = session.take_unfinished_step()
    return None if table is None else StepState.restored(run.cfg, table, session.step)


def update_weights(run: RLRun, version: int, *, verify: bool) -> None:
    """Give the engine the actor's weights as version `version`; `verify` that it holds them."""
    with run.phases("reshard"):
        run.engine.update_weights(run.actor.shard, version=version)
    if verify:
        with run.phases("certificate"):
            run.engine.verify_weights(run.actor.shard)


def follow_actor(run: RLRun, number: int, state: StepState, kl: Metric) -> Metrics:
    """Adapt the coefficient of the KL after step `number`, and move the reference if it is due."""
    run.kl.update(kl, state.experience.num_samples)
    if run.moving_reference is None:
        return {}
    return {"reference_moved": int(run.moving_reference.after(number))}


def warn_without_signal(run: RLRun, session: Session, state: StepState, metrics: Metrics) -> None:
    """Warn, with likely causes, if nothing could be learnt from the step."""
    prompt_of, grouped = run.data.prompt_of, run.cfg.algo.traits.compares_groups
    warning = signal_warning(
        session.number, state.experience, metrics, run.rewarder.signal, prompt_of, run.data.tokenizer, grouped=grouped
    )
    if warning:
        session.note(warning)


def show_samples(run: RLRun, session: Session, state: StepState) -> None:
    """Write the lengths of the step's samples, and a table of some of them if it is due. Collective."""
    samples, experience, number = run.cfg.samples, state.experience, session.number
    if samples.every and (number == 1 or is_due(number, samples.every)):
        kl_N = kl_by_sample(experience, run.cfg.algo.kl)
        if session.records is not None:  # rank 0
            prompts = list(map(run.data.prompt_of, experience.per_sample["records"].tolist()))
            tokenizer, environment = run.data.tokenizer, run.environment
            rows = training_rows(samples, number, experience, prompts, tokenizer, kl_N, environment)
            session.show("train", number, rows)
    further = conversation_lengths(experience.rollouts)
    session.keep_lengths(experience.prompt_lengths_N.tolist(), experience.response_lengths_N.tolist(), **further)


@contextlib.contextmanager
def closed_at_the_end(engine: RolloutEngine) -> Iterator[None]:
    """Close the engine when the run ends in order, but not after a failure (see `RolloutEngine.close`)."""
    try:
        yield
    except StopRun:
        engine.close()
        raise
    engine.close()
