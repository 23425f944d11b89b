"""The supervised loop: read samples, then train on a mini-batch, evaluate, log and save, step after step.

What a command brings to it is an `Objective` (`objective.py`): `sft.py`, `rm.py` and `dpo.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import SFTConfig, describe_sources
from megarlhf.data.samples.dataset import Samples
from megarlhf.data.samples.order import batches_of, describe_mixture
from megarlhf.data.text.export_files import export_files
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.errors import Interrupted
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases, seconds_of
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, prompts_computed
from megarlhf.parallel.router_balance import ROUTER_AUX_LOSS
from megarlhf.planning.data.encoders import indexed_options
from megarlhf.planning.data.formatting import writing_of_training
from megarlhf.resume.claim.identity import architecture_of, bases_of_adapters, digest_of_samples, identity_of_weights
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRequest
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.best_checkpoint import Best, Patience
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.resumable import ResumableState
from megarlhf.trainers.run.session import Session, is_due, open_session
from megarlhf.trainers.run.skipped_steps import Failures, StepGuard, Update
from megarlhf.trainers.run.test_split import log_test_metrics, prefix_test
from megarlhf.trainers.supervised.objective import Metrics, Objective, Sample, ShouldStop

_BATCHES_AT_ONCE = 4
"""Micro-batches for each pipeline stage between two questions whether to stop."""


def run_supervised(objective: Objective[Sample], runtime: Runtime, parts: RunFactories) -> None:
    """Train the objective's role on its samples."""
    with (
        StopRequest(device=runtime.device, speaks=runtime.is_main) as stop,
        parts.phases(objective.cfg.watchdog, objective.cfg.profile, objective.cfg.run.dir, runtime) as phases,
    ):
        run_in(phases, stop, objective, runtime, parts)


def run_in(
    phases: Phases, stop_request: StopRequest, objective: Objective[Sample], runtime: Runtime, parts: RunFactories
) -> None:
    """The loop."""
    cfg = objective.cfg
    with phases("build"):
        train, validation, notes = load_samples(objective)
        test, of_test = load_test(objective, train)
        notes += of_test
        order = batches_of(train, cfg.train.mini_batch_samples, cfg.run.seed, "train.mini_batch_samples")
        notes += describe_mixture(order, cfg.train.num_steps, cfg.data.train)
        cache = GroupCache(runtime)
        device_memory = DeviceMemory(runtime.device, parts.host(runtime.device), shared=objective.has_frozen)
        role = build_role(
            objective.role_name,
            objective.section,
            objective.head,
            cache,
            seed=cfg.run.seed,
            num_optimizer_steps=cfg.train.num_steps,
            new_head=True,
            config_overrides=objective.stated,
            companion_files=export_files(objective.section.model, cfg.data, ends_of(objective, train)),
            weights=parts.weights,
            device_memory=device_memory,
        )
        frozen = objective.build_frozen(cache, role, parts.weights, device_memory)
        for built in (role, *frozen):
            phases.before |= built.parts.before_phases(built.name)
        step_guard = StepGuard(cfg.train, Failures.of(cfg, objective.command), phases)
        stop, best = Patience(cfg.train.stop, objective.command), Best(cfg.checkpoint.best, objective.command)
        states: dict[str, Stateful] = {f"bad_steps/{role.name}": step_guard, "order": order}
        states |= {"stop": stop} if cfg.train.stop.patience is not None else {}
        training = ResumableState(
            cfg.checkpoint,
            [role],
            stop_request,
            data=digest_of_samples(train),
            states=states,
            base={role.name: identity_of_weights(role)},
            writing=writing_of_training(cfg, role.name),
            reference=next((identity_of_weights(each) for each in frozen if each.name == "reference"), None),
            architectures={each.name: architecture_of(each) for each in (role, *frozen)},
            others=_digests_beside(objective, validation),
            adapter_bases=bases_of_adapters([role]),
            best=best,
            writer=parts.writer,
        )
    total = cfg.train.num_steps
    with open_session(cfg, cfg.run, runtime, objective.command, total, notes, training, phases=phases) as session:
        if not session.resumed:
            with session.stoppable("eval"):
                evaluation = evaluate(objective, role, validation, session.asked_to_stop)
            stop.watch(evaluation)
            session.log_start(evaluation)
        as_trained = True
        while session.has_steps_left(total, stop.reason):
            step = session.begin_step()
            trained = session.take_table()
            if trained is None:
                update = Update(step + 1, None, order.take(step))
                samples = [train[n] for n in update.samples]
                trained = {"metrics": train_on(objective, role, samples, update, step_guard, phases)}
                session.step_boundary(step, 1, partial(dict, trained), only_to_stop=True)
            done = step + 1
            metrics, evaluation = dict(trained["metrics"]), Metrics()
            last, due = done == total, is_due(done, cfg.eval.every)
            if due and not (last and objective.rescales):
                with session.stoppable("eval"):
                    evaluation = evaluate(objective, role, validation, session.asked_to_stop)
                last = stop.watch(evaluation) or last
            if last and objective.rescales:
                rescale(objective, role, validation, session)
                as_trained = False
            if last:
                evaluated = due and as_trained
                evaluation |= close(
                    objective, role, validation, test, session, evaluated=evaluated, as_trained=as_trained
                )
            is_best = best.watch(evaluation)
            scaled = scaled_for_export(objective, role, validation, session, done, last=last, best=is_best)
            session.end_step(
                metrics | evaluation,
                [role],
                last=last,
                best=is_best,
                seconds=lambda lap: {"seconds": seconds_of(lap).get("seconds_train", 0.0)},
                around_export=scaled,
                resumable=as_trained,
            )
        session.finish(stop.reason, keep_state=as_trained)


def close(
    objective: Objective[Sample],
    role: Role,
    validation: Sequence[Sample],
    test: Sequence[Sample],
    session: Session,
    *,
    evaluated: bool,
    as_trained: bool,
) -> Metrics:
    """Measure held-out and test data after the last step. Collective.

    evaluated: held-out samples have been
    as_trained: nothing but updates has changed the weights, so that the run can be left
    """
    metrics: Metrics = {}
    with session.stoppable("eval") if as_trained else session.phases("eval"):
        should_stop = session.asked_to_stop if as_trained else None
        if not evaluated:
            metrics |= evaluate(objective, role, validation, should_stop)
        if validation:
            closing, report = objective.closing_report(role, validation, should_stop)
            metrics |= closing
            session.write_report("calibration.json", report)
        of_test = prefix_test(evaluate(objective, role, test, should_stop))
        if test:
            of_test |= prefix_test(objective.closing_report(role, test, should_stop)[0])
    log_test_metrics(session, of_test)
    return metrics | of_test


def _digests_beside(objective: Objective[Sample], validation: Sequence[Sample]) -> dict[str, str]:
    """Digests of what else takes part in what is computed."""
    decides = objective.cfg.train.stop.patience is not None
    digests = {"data.validation (decides when the run ends)": digest_of_samples(validation)} if decides else {}
    return digests | objective.digests_beside(validation)


def rescale(objective: Objective[Sample], role: Role, validation: Sequence[Sample], session: Session) -> None:
    """Once a point of the last border is complete, from which the run goes on if it is killed or prolonged."""
    session.save_boundary()
    with session.stoppable("eval"):
        scale = objective.measure_scale(role, validation, session.asked_to_stop)
    session.discard_boundary()  # from here to the end nothing asks whether to stop
    session.note(objective.rescale(role, scale))


@contextlib.contextmanager
def scaled_for_export(
    objective: Objective[Sample],
    role: Role,
    validation: Sequence[Sample],
    session: Session,
    step: int,
    *,
    last: bool,
    best: bool = False,
) -> Iterator[None]:
    """The weights as they are exported; behind it they are what training goes on with, bit for bit. After the last step
    they have been rescaled already."""
    if last or not (objective.rescales and (best or session.exports_at(step))):
        yield
        return
    with session.stoppable("eval"):
        scale = objective.measure_scale(role, validation, session.asked_to_stop)
    kept = {name: tensor.clone() for name, tensor in role.shard.parameters().items() if objective.rescaled(name)}
    objective.rescale(role, scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                role.shard.parameters()[name].copy_(tensor)


def load_samples(objective: Objective[Sample]) -> tuple[Samples[Sample], Sequence[Sample], list[str]]:
    """Training and held-out samples, on every rank, and what was skipped in words.

    Raises: ValueError when a sample does not fit the model's positions or a micro-batch.
    """
    cfg, hf_directory = objective.cfg, objective.section.model.hf_directory()
    max_positions = architecture_from_hf(hf_directory).longest_sequence
    indexed = indexed_options(cfg) if isinstance(cfg, SFTConfig) else None
    loader = SetLoader(cfg.data, objective.encoder(), objective.sample_type, run_dir=cfg.run.dir, indexed=indexed)
    train, validation, notes = loader.train_and_validation(objective.command)
    objective.require_fitting(train, max_positions, describe_sources(cfg.data.train))
    if validation:
        objective.require_fitting(validation, max_positions, describe_sources(cfg.data.validation or cfg.data.train))
    return train, validation[: cfg.eval.max_samples], notes


def load_test(objective: Objective[Sample], train: Samples[Sample]) -> tuple[Sequence[Sample], list[str]]:
    """Samples for figures, on every rank, and in words what was skipped and how many prompts are those of `train`.
    Raises: ValueError as `load_samples`."""
    cfg, hf_directory = objective.cfg, objective.section.model.hf_directory()
    if cfg.data.test is None:
        return [], []
    indexed = indexed_options(cfg) if isinstance(cfg, SFTConfig) else None
    loader = SetLoader(cfg.data, objective.encoder(), objective.sample_type, run_dir=cfg.run.dir, indexed=indexed)
    test, notes = loader.test(train)
    objective.require_fitting(
        test, architecture_from_hf(hf_directory).longest_sequence, describe_sources(cfg.data.test)
    )
    return test, notes


def ends_of(objective: Objective[Sample], samples: Sequence[Sample]) -> set[int]:
    """The tokens with which the first samples end."""
    some = (samples[n] for n in range(min(len(samples), 100)))
    return {tokens[-1] for sample in some for tokens in objective.sequences(sample)}


def train_on(
    objective: Objective[Sample],
    role: Role,
    samples: Sequence[Sample],
    update: Update,
    step_guard: StepGuard,
    phases: Phases,
) -> Metrics:
    """One optimizer step on one mini-batch, the same list on every rank."""
    assert role.trainer is not None
    learning_rate = role.trainer.learning_rate
    if objective.scores:
        with phases("score"):
            samples = objective.scored(role, samples)
    with phases(f"train/{role.name}"):
        loss = objective.training_loss(role, samples)
        by_rank = objective.layouts_by_rank(role, samples)
        batches = objective.micro_batches(role, samples, by_rank)
        sums = role.accumulate(batches, loss).sums
    result = step_guard.apply(role, sums, update, batches, loss)
    tokens = sum(sum(objective.sequence_lengths(sample)) for sample in samples)
    phases.count("tokens_per_second", tokens)
    learned: Metrics = {"loss": sums["loss"], "grad_norm": result.grad_norm}
    learned |= objective.training_metrics(sums, samples)
    if ROUTER_AUX_LOSS in sums:
        learned[ROUTER_AUX_LOSS] = sums[ROUTER_AUX_LOSS]
    shared: Metrics = {}
    if any(map(objective.shared_length, samples)):
        shared = dict(zip(("prompts_computed", "prompts_saved"), prompts_computed(by_rank), strict=True))
    return {
        **(dict.fromkeys(learned) if result.skipped else learned),
        **shared,
        "learning_rate": learning_rate,
        "skipped_steps": int(bool(result.skipped)),
        "tokens": tokens,
    }


def evaluate(
    objective: Objective[Sample], role: Role, samples: Sequence[Sample], should_stop: ShouldStop = None
) -> Metrics:
    """Metrics of held-out samples; nothing without held-out data. Collective. Raises: see `validation_sums`."""
    if not samples:
        return {}
    samples = objective.scored(role, samples, should_stop)
    return objective.validation_metrics(validation_sums(objective, role, samples, should_stop), samples)


def validation_sums(
    objective: Objective[Sample], role: Role, samples: Sequence[Sample], should_stop: ShouldStop = None
) -> dict[str, float]:
    """The held-out loss, called `loss`, and its sums over the samples, on every rank. Collective.

    Raises: Interrupted, on every rank, when `should_stop` says so on one between some micro-batches and the next ones.
    """
    loss = objective.validation_loss(role, samples)

    def score(output: Tensor, batch: MicroBatch) -> Tensor:
        value, sums, _ = loss(output, batch)
        return torch.cat([value.reshape(1).double(), sums.double()])

    per_micro_batch: list[Tensor] = []
    for batches in rounds(objective.micro_batches(role, samples), role, should_stop):
        per_micro_batch += role.forward(batches, score)
    total = torch.zeros(1 + len(loss.names), dtype=torch.float64, device=role.mesh.runtime.device)
    if role.mesh.owns_outputs:
        total += torch.stack(per_micro_batch).sum(0)
    dist.all_reduce(total)
    return dict(zip(("loss", *loss.names), total.tolist(), strict=True))


def rounds(batches: Sequence[MicroBatch], role: Role, should_stop: ShouldStop) -> Iterator[Sequence[MicroBatch]]:
    """The micro-batches in parts, before each of which all ranks ask each other whether to stop; all at once where
    nothing may stop them. Data-parallel ranks may have another number of parts."""
    if should_stop is None:
        yield batches
        return
    size = _BATCHES_AT_ONCE * role.mesh.layout.pp
    most = torch.tensor(len(batches), device=role.mesh.runtime.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for start in range(0, int(most), size):
        stop = torch.tensor(int(should_stop()), device=role.mesh.runtime.device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if int(stop):
            raise Interrupted(f"an evaluation was asked to stop after {start} micro-batches of a rank")
        if part := batches[start : start + size]:
            yield part
