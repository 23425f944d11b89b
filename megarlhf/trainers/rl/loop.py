"""PPO, GRPO and their relatives: one loop; `algo` and `rewards` say which.

Generate, score, advantages, train, update weights. Every rank runs every line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from megarlhf.config import RLConfig
from megarlhf.config.algo import GROUPED
from megarlhf.data.samples.dataset import by_record
from megarlhf.data.samples.order import ShuffledBatches, batches_of, describe_mixture
from megarlhf.observe.watch.phases import seconds_of
from megarlhf.planning.kl_reference import anchor_notes
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRequest, StopRun
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.factory import engine_dtype
from megarlhf.rollout.response_cache import RolloutCache
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.no_signal import alarm
from megarlhf.trainers.experience.prompts import PromptData, load_prompts
from megarlhf.trainers.rl.build import Components, build, training_of
from megarlhf.trainers.rl.evaluation import Evaluator, StopRule
from megarlhf.trainers.rl.logprob_gap import MismatchGuard
from megarlhf.trainers.rl.metrics import describe, kl_by_sample
from megarlhf.trainers.rl.rollout import Drawing
from megarlhf.trainers.rl.sample_rows import training_rows
from megarlhf.trainers.rl.scoring import score
from megarlhf.trainers.rl.update import Metrics, StepState, train_on
from megarlhf.trainers.run.best_checkpoint import Best
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.session import Session, is_due, open_session
from megarlhf.trainers.run.test_split import log_test_metrics


def run(cfg: RLConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Improve the actor on its own samples."""
    with (
        StopRequest(device=runtime.device, speaks=runtime.is_main) as stop_request,
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
            )
            order = batches_of(data.train, cfg.train.prompts_per_step, cfg.run.seed, "train.prompts_per_step")
            components = build(cfg, runtime, data.tokenizer, phases, parts)
            loop = Loop(cfg, components, data, order)
            training = training_of(cfg, components, data, loop.states, loop.best, loop.bank, stop_request, parts)
            mixture = describe_mixture(order, cfg.train.num_steps, cfg.data.train)
            notes = [*data.notes, *mixture, *anchor_notes(cfg, training.reference)]
        with (
            contextlib.closing(components.rewarder),
            contextlib.closing(loop.evaluate),
            closed_at_the_end(components.engine),
            open_session(cfg, cfg.run, runtime, "rl", cfg.train.num_steps, notes, training, phases=phases) as session,
        ):
            loop.run(session)


class Loop:
    """The steps of a run, from where it is to its last one."""

    def __init__(self, cfg: RLConfig, components: Components, data: PromptData, order: ShuffledBatches) -> None:
        self.cfg, self.components, self.data, self.order = cfg, components, data, order
        self.evaluate = Evaluator(cfg, components, data.validation, data.test)
        self.stop, self.best = StopRule(cfg.train.stop), Best(cfg.checkpoint.best, "rl")
        dtypes = components.actor.shard.dtype, engine_dtype(cfg.rollout, components.actor)
        self.gap = MismatchGuard(cfg.rollout.logprob_gap, min(dtypes, key=lambda dtype: dtype.itemsize))
        self.bank = RolloutCache(cfg.run.dir / "bank")
        self.of_record = by_record(data.train)
        self.states: dict[str, Stateful] = {"stop": self.stop, "logprob_gap": self.gap, "order": order}

    def run(self, session: Session) -> None:
        """Every step: experience, updates, weights into the engine, evaluation where one is due."""
        cfg, components, stop, gap = self.cfg, self.components, self.stop, self.gap
        step, num_steps = session.start.step, cfg.train.num_steps
        update_weights(components, step, certify=True)
        if not session.resumed:
            session.log(0, self._evaluate(session, 0, due=True))
            session.border(0)
        if not session.start.update:  # the run had ended there; a step in progress is completed and exported first
            gap.raise_if_failed(last=step == num_steps)
        while step < num_steps and stop.reason is None:
            components.phases.begin_step(step + 1)
            rebuilds = components.engine.rebuilds
            work = StepState.restored(session.take_table()) or self._experience(step, session)
            trained = train_on(cfg, components, work, step, partial(at_border, session, step), gap.watch)
            described = describe(work.experience, cfg)
            metrics: Metrics = {**work.found, **described, **trained}
            step += 1
            self._warn(session, step, work, described)
            session.stop_if_asked()
            update_weights(components, step, certify=step == 1 or is_due(step, cfg.rollout.verify_weights_every))
            last = stop.watch_kl(described["kl"]) or step == num_steps
            is_best = False
            if (due := is_due(step, cfg.eval.every)) or last:
                evaluation = self._evaluate(session, step, due=due)
                metrics, is_best = {**metrics, **evaluation}, self.best.watch(evaluation)
                last = last or stop.reason is not None
            if last and self.evaluate.has_test:
                with session.stoppable("eval"):
                    of_test = self.evaluate.test(session.asked_to_stop)
                log_test_metrics(session, of_test)
                metrics |= of_test
            components.kl.update(described["kl"], work.experience.num_samples)
            if components.moving_reference is not None:
                metrics["reference_moved"] = int(components.moving_reference.after(step))
            if components.engine.rebuilds > rebuilds:
                metrics["engine_rebuilds"] = components.engine.rebuilds - rebuilds
            if is_due(step, cfg.samples.every):
                self._show(session, step, work)
            lengths = work.experience.prompt_lengths_N, work.experience.response_lengths_N
            session.keep_lengths(step, *(lengths_N.tolist() for lengths_N in lengths))
            metrics |= components.phases.rates()
            session.log(step, metrics | seconds_of(components.phases.end_step(step)))
            session.export(step, components.exported, last=last or gap.failed(last=last), best=is_best)
            session.border(step)
            gap.raise_if_failed(last=last)
        session.finish(step, stop.reason or NO_STEPS_LEFT, stop.reason or f"all {num_steps} steps done")
        if not cfg.checkpoint.by_cadence:
            self.bank.forget_before(step)  # a finished run without resume points does not go on

    def _experience(self, step: int, session: Session) -> StepState:
        """Rollout, rewards, log-probs and values, advantages of a step."""
        cfg, components = self.cfg, self.components
        prompts = [self.data.train[n] for n in self.order.indices(step)]
        drawing = Drawing(cfg, components, self.data.train, self.bank, session, step)
        experience, rewards = score(drawing, drawing.responses_to(prompts), prompts)
        with components.phases("advantages"):
            work = StepState.begun(cfg, components, experience, rewards)
            if not cfg.old_logprobs_in_training(step):
                self.gap.watch(work.found)
            return work

    def _warn(self, session: Session, step: int, work: StepState, described: Metrics) -> None:
        """Where nothing could be learnt from the step."""
        watch, grouped = self.components.rewarder.signal, self.cfg.algo.advantage in GROUPED
        tokenizer, experience = self.data.tokenizer, work.experience
        if warning := alarm(step, experience, described, watch, self.of_record, tokenizer, grouped=grouped):
            session.note(warning)

    def _show(self, session: Session, step: int, work: StepState) -> None:
        """A table of samples of the step that is done. Collective."""
        kl_N = kl_by_sample(work.experience, self.cfg.algo.kl)
        if session.records is not None:  # rank 0
            prompts = [self.of_record(record) for record in work.experience.per_sample["records"].tolist()]
            rows = training_rows(self.cfg, step, work.experience, prompts, self.data.tokenizer, kl_N)
            session.show("train", step, rows)

    def _evaluate(self, session: Session, step: int, *, due: bool) -> Metrics:
        """Of the held-out prompts; only one that is due by `eval.every` counts for the rules that stop."""
        with session.stoppable("eval"):
            evaluation, rows = self.evaluate(step, session.asked_to_stop)
        session.show("eval", step, rows)
        if due:
            self.stop.watch(evaluation)
        return evaluation


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


def at_border(session: Session, step: int, work: StepState, last: bool) -> None:
    """After an update of a step. After the last one a point is written only where the run is asked to stop before the
    step is complete: what is left of it, such as its evaluation, is then done after the resume."""
    session.border(step, work.updates, work.table(), only_to_stop=last)
