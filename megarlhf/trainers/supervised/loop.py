"""The supervised loop: reads samples, then trains on a mini-batch, evaluates, logs and saves, step after step.

Each command is an `Objective` (`objective.py`): `sft.py`, `rm.py` and `dpo.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import SFTConfig, describe_sources
from megarlhf.data.samples.dataset import Samples
from megarlhf.data.samples.order import ShuffledBatches, batches_of, describe_mixture
from megarlhf.data.text.export_files import export_files
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.errors import Interrupted
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases, seconds_of
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, prompts_computed
from megarlhf.parallel.router_balance import ROUTER_AUX_LOSS
from megarlhf.planning.batch import passes_note, with_counted_steps
from megarlhf.planning.data.encoders import indexed_options
from megarlhf.planning.data.formatting import writing_of_training
from megarlhf.planning.own_code import own_sources
from megarlhf.resume.claim.identity import architecture_of, bases_of_adapters, digest_of_samples, identity_of_weights
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRequest
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.best_checkpoint import Best, Patience
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.open_session import open_session
from megarlhf.trainers.run.resumable import ResumableState
from megarlhf.trainers.run.session import Session, is_due
from megarlhf.trainers.run.skipped_steps import Failures, StepGuard, Update
from megarlhf.trainers.run.test_split import log_test_metrics, prefix_test
from megarlhf.trainers.supervised.objective import Metrics, Objective, Sample, ShouldStop

_BATCHES_AT_ONCE = 4
"""Micro-batches per pipeline stage between two checks whether to stop."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRun(Generic[Sample]):
    """Samples, trained role and stop rules of a supervised run."""

    objective: Objective[Sample]
    role: Role
    train: Samples[Sample]
    validation: Sequence[Sample]
    test: Sequence[Sample]
    order: ShuffledBatches
    step_guard: StepGuard
    stop: Patience
    best: Best


def run_supervised(objective: Objective[Sample], runtime: Runtime, parts: RunFactories) -> None:
    """Train the objective's role on its samples."""
    cfg, command = objective.cfg, objective.command
    with (
        StopRequest(device=runtime.device, announces=runtime.is_main) as stop_request,
        parts.phases(cfg.watchdog, cfg.profile, cfg.run.dir, runtime) as phases,
    ):
        with phases("build"):
            run, training, notes = build(objective, runtime, parts, phases, stop_request)
        cfg = objective.cfg  # with the number of steps
        with open_session(
            cfg, cfg.run, runtime, command, cfg.train.num_steps, notes, training, phases=phases
        ) as session:
            train(run, session)


def build(
    objective: Objective[Sample], runtime: Runtime, parts: RunFactories, phases: Phases, stop_request: StopRequest
) -> tuple[SupervisedRun[Sample], ResumableState, list[str]]:
    """Read the samples and build the roles; returns notes too. Collective."""
    samples, validation, notes = load_samples(objective)
    size = objective.cfg.train.mini_batch_samples
    objective.cfg = with_counted_steps(objective.cfg, len(samples), size)
    cfg = objective.cfg
    test, test_notes = load_test(objective, samples)
    order = batches_of(samples, cfg.train.mini_batch_samples, cfg.run.seed, "train.mini_batch_samples")
    mixture = describe_mixture(order, cfg.train.num_steps, cfg.data.train)
    notes = [*notes, *test_notes, *(mixture or [passes_note(cfg.train.num_steps, size, len(samples))])]
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
        config_overrides=objective.config_overrides,
        companion_files=export_files(objective.section.model, cfg.data, ends_of(objective, samples)),
        weights=parts.weights,
        device_memory=device_memory,
    )
    frozen = objective.build_frozen(cache, role, parts.weights, device_memory)
    for built in (role, *frozen):
        phases.before |= built.parts.before_phases(built.name)
    run = SupervisedRun(
        objective=objective,
        role=role,
        train=samples,
        validation=validation,
        test=test,
        order=order,
        step_guard=StepGuard(cfg.train, Failures.of(cfg, objective.command), phases),
        stop=Patience(cfg.train.stop, objective.command),
        best=Best(cfg.checkpoint.best, objective.command),
    )
    return run, _resumable_state(run, frozen, parts, stop_request), notes


def _resumable_state(
    run: SupervisedRun[Sample], frozen: Sequence[Role], parts: RunFactories, stop_request: StopRequest
) -> ResumableState:
    objective, role = run.objective, run.role
    cfg = objective.cfg
    states: dict[str, Stateful] = {f"bad_steps/{role.name}": run.step_guard, "order": run.order}
    others = objective.other_digests(run.validation)
    if cfg.train.stop.patience is not None:
        states["stop"] = run.stop
        others = {"data.validation (decides when the run ends)": digest_of_samples(run.validation), **others}
    return ResumableState(
        cfg.checkpoint,
        [role],
        stop_request,
        data=digest_of_samples(run.train),
        states=states,
        base={role.name: identity_of_weights(role)},
        writing=writing_of_training(cfg, role.name),
        frozen={built.name: identity_of_weights(built) for built in frozen},
        architectures={built.name: architecture_of(built) for built in (role, *frozen)},
        others=others,
        sources=own_sources(cfg),
        adapter_bases=bases_of_adapters([role]),
        best=run.best,
        writer=parts.writer,
    )


def train(run: SupervisedRun[Sample], session: Session) -> None:
    """Train, evaluate, log and save, step after step. Every rank runs every line."""
    objective, role, validation = run.objective, run.role, run.validation
    num_steps, eval_every = objective.cfg.train.num_steps, objective.cfg.eval.every
    if not session.resumed:
        with session.stoppable("eval"):
            evaluation = evaluate(objective, role, validation, session.asked_to_stop)
        run.stop.watch(evaluation)
        session.log_start(evaluation)
    as_trained = True
    while session.has_steps_left(num_steps, run.stop.reason):
        step, number = session.begin_step()
        trained = session.take_unfinished_step()
        if trained is None:
            update = Update(step, None, run.order.take(step))
            samples = [run.train[n] for n in update.samples]
            trained = {"metrics": train_on(objective, role, samples, update, run.step_guard, session.phases)}
            session.step_boundary(step, 1, partial(dict, trained), only_to_stop=True)
        metrics, evaluation = dict(trained["metrics"]), Metrics()
        last, due = number == num_steps, is_due(number, eval_every)
        if due and not (last and objective.rescales):
            with session.stoppable("eval"):
                evaluation = evaluate(objective, role, validation, session.asked_to_stop)
            last = run.stop.watch(evaluation) or last
        if last and objective.rescales:
            rescale(objective, role, validation, session)
            as_trained = False
        if last:
            evaluation |= final_evaluation(run, session, evaluated=due and as_trained, as_trained=as_trained)
        is_best = run.best.watch(evaluation)
        scaled = scaled_for_export(objective, role, validation, session, number, last=last, best=is_best)
        session.end_step(
            metrics | evaluation,
            [role],
            last=last,
            best=is_best,
            seconds=lambda lap: {"seconds": seconds_of(lap).get("seconds_train", 0.0)},
            around_export=scaled,
            resumable=as_trained,
        )
    session.finish(run.stop.reason, keep_state=as_trained)


def final_evaluation(run: SupervisedRun[Sample], session: Session, *, evaluated: bool, as_trained: bool) -> Metrics:
    """Measure held-out and test data after the last step. Collective.

    evaluated: whether the held-out samples have been evaluated already
    as_trained: whether only updates have changed the weights, so that the run can still stop
    """
    objective, role, validation = run.objective, run.role, run.validation
    metrics: Metrics = {}
    with session.stoppable("eval") if as_trained else session.phases("eval"):
        should_stop = session.asked_to_stop if as_trained else None
        if not evaluated:
            metrics |= evaluate(objective, role, validation, should_stop)
        if validation:
            closing, report = objective.closing_report(role, validation, should_stop)
            metrics |= closing
            session.write_report("calibration.json", report)
        test_metrics = prefix_test(evaluate(objective, role, run.test, should_stop))
        if run.test:
            test_metrics |= prefix_test(objective.closing_report(role, run.test, should_stop)[0])
    log_test_metrics(session, test_metrics)
    return metrics | test_metrics


def rescale(objective: Objective[Sample], role: Role, validation: Sequence[Sample], session: Session) -> None:
    """Rescale the role after a point of the last boundary is written, from which a killed or prolonged run goes on."""
    session.save_boundary()
    with session.stoppable("eval"):
        scale = objective.measure_scale(role, validation, session.asked_to_stop)
    session.discard_boundary()  # from here on the run does not stop before its end
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
    """Rescale the weights for an export inside the block, and restore them bit for bit afterwards. After the last step
    they are rescaled already."""
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
    """Training and held-out samples, on every rank, and notes about skipped records.

    Raises: ValueError if a sample exceeds the model's positions or a micro-batch.
    """
    cfg = objective.cfg
    loader, max_positions = _loader(objective)
    train, validation, notes = loader.train_and_validation(objective.command)
    objective.require_fitting(train, max_positions, describe_sources(cfg.data.train))
    if validation:
        objective.require_fitting(validation, max_positions, describe_sources(cfg.data.validation or cfg.data.train))
    return train, validation[: cfg.eval.max_samples], notes


def load_test(objective: Objective[Sample], train: Samples[Sample]) -> tuple[Sequence[Sample], list[str]]:
    """Samples of `data.test`, on every rank, and notes about skipped records and prompts that are in `train` too.
    Raises: ValueError as `load_samples`."""
    if objective.cfg.data.test is None:
        return [], []
    loader, max_positions = _loader(objective)
    test, notes = loader.test(train)
    objective.require_fitting(test, max_positions, describe_sources(objective.cfg.data.test))
    return test, notes


def _loader(objective: Objective[Sample]) -> tuple[SetLoader[Sample], int]:
    """Loader of the objective's samples, and the positions of its model."""
    cfg = objective.cfg
    indexed = indexed_options(cfg) if isinstance(cfg, SFTConfig) else None
    loader = SetLoader(cfg.data, objective.encoder(), objective.sample_type, run_dir=cfg.run.dir, indexed=indexed)
    return loader, architecture_from_hf(objective.section.model.hf_directory()).longest_sequence


def ends_of(objective: Objective[Sample], samples: Sequence[Sample]) -> set[int]:
    """Last tokens of the first samples."""
    first = (samples[n] for n in range(min(len(samples), 100)))
    return {tokens[-1] for sample in first for tokens in objective.sequences(sample)}


def train_on(
    objective: Objective[Sample],
    role: Role,
    samples: Sequence[Sample],
    update: Update,
    step_guard: StepGuard,
    phases: Phases,
) -> Metrics:
    """Make one optimizer step on a mini-batch, the same list on every rank."""
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
    """Metrics of held-out samples; nothing without samples. Collective. Raises: see `validation_sums`."""
    if not samples:
        return {}
    samples = objective.scored(role, samples, should_stop)
    return objective.validation_metrics(validation_sums(objective, role, samples, should_stop), samples)


def validation_sums(
    objective: Objective[Sample], role: Role, samples: Sequence[Sample], should_stop: ShouldStop = None
) -> dict[str, float]:
    """Loss on held-out samples, named `loss`, and its sums over the samples, on every rank. Collective.

    Raises: Interrupted, on every rank, if `should_stop` returns True on any between two rounds of micro-batches.
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
    """Split the micro-batches into rounds. Before each, all ranks agree whether to stop. Without `should_stop`: one
    round. Data-parallel ranks may have different numbers of rounds.

    Raises: Interrupted, on every rank.
    """
    if should_stop is None:
        yield batches
        return
    size = _BATCHES_AT_ONCE * role.mesh.layout.pp
    largest = torch.tensor(len(batches), device=role.mesh.runtime.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    for start in range(0, int(largest), size):
        stop = torch.tensor(int(should_stop()), device=role.mesh.runtime.device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if int(stop):
            raise Interrupted(f"an evaluation was asked to stop after {start} micro-batches of a rank")
        if part := batches[start : start + size]:
            yield part
