"""A command's run besides its loop: run directory, metrics, progress, resume points, exports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rich.console import RenderableType

from megarlhf.atomic_write import atomic_write
from megarlhf.collective_errors import from_first_rank, on_first_rank
from megarlhf.config import FrozenModel, RLConfig, RunConfig
from megarlhf.errors import Interrupted, RewardError, WatchdogTimeout
from megarlhf.models.role import Role
from megarlhf.observe.records.cost_metrics import measure
from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.records.run_directory import CONFIG_FILE
from megarlhf.observe.records.sample_tables import Kind, Row
from megarlhf.observe.records.step_records import Records, open_records, require_readable_records
from megarlhf.observe.records.wandb_run import WandbRun
from megarlhf.observe.terminal.progress import Progress
from megarlhf.observe.watch.phases import Phases, seconds_of
from megarlhf.provenance import Provenance
from megarlhf.resume.claim.identity import History
from megarlhf.resume.claim.lock import LockError
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, Claim, claim, finish
from megarlhf.resume.points import point
from megarlhf.resume.points.checkpointer import Checkpointer
from megarlhf.resume.points.point import Position
from megarlhf.resume.points.restore import Identity, MakeTable, Table, restore
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRun
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.exports import Exports, point_at_best, set_exports_aside
from megarlhf.trainers.run.resumable import ResumableState, identity_of


class UnfinishedStep(Protocol):
    """A step of several updates, of which some are made."""

    updates: int

    def table(self) -> MakeTable:
        """Maker of its content for a resume point."""
        ...


@dataclass
class Session:
    """An open run. Only rank 0 writes; the others go through the same calls."""

    runtime: Runtime
    run_dir: Path
    records: Records | None = None
    """On rank 0."""
    progress: Progress | None = None
    """Before it is opened, notes are kept."""
    history: History = field(default_factory=History)
    resumed: bool = False
    start: Position = field(default_factory=lambda: Position(0))
    """How far the run was when it was resumed."""
    step: int = 0
    """Steps that are done, as versions of the weights count. People count from 1: the next one is `step + 1`."""
    checkpointer: Checkpointer | None = None
    """Writer of resume points, in a run that trains."""
    exports: Exports | None = None
    phases: Phases = field(default_factory=Phases)
    began_with: Mapping[str, str] = field(default_factory=dict)
    """Digests of the run's models and data, by name."""
    _table: Table | None = None

    def take_table(self) -> Table | None:
        """Content of the unfinished step in which the run was left, if it was left in one. Asked again: None."""
        table, self._table = self._table, None
        return table

    def log_start(self, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of what training begins with. Collective."""
        self.log(0, metrics)
        self.step_boundary(0)

    def has_steps_left(self, num_steps: int, stop_reason: str | None) -> bool:
        """Whether the run goes on: not behind its last step, and not where a rule has ended it."""
        return self.step < num_steps and stop_reason is None

    def begin_step(self) -> int:
        """Begin the next step; returns how many are done."""
        self.phases.begin_step(self.step + 1)
        return self.step

    def update_boundary(self, state: UnfinishedStep, last: bool) -> None:
        """Mark a point between two updates of a step where the run can be saved.

        After the last update a point is written only where the run is asked to stop before the step is complete: what
        is left of it, such as its evaluation, is then done after the resume.
        """
        self.step_boundary(self.step, state.updates, state.table(), only_to_stop=last)

    def end_step(
        self,
        metrics: Mapping[str, Metric],
        roles: Sequence[Role],
        *,
        last: bool,
        best: bool = False,
        seconds: Callable[[Mapping[str, float]], dict[str, float]] = seconds_of,
        around_export: contextlib.AbstractContextManager[None] | None = None,
        resumable: bool = True,
    ) -> None:
        """Count the step as done: record its metrics with rates and seconds, export the roles where that is due, and
        mark the point where the run can be saved. Collective.

        seconds: metrics from the seconds of each phase
        around_export: entered while weights are exported
        resumable: False where the weights are no longer those that training would go on with
        """
        self.step += 1
        rates = self.phases.rates()
        self.log(self.step, {**metrics, **rates, **seconds(self.phases.end_step(self.step))})
        with around_export or contextlib.nullcontext():
            self.export(self.step, roles, last=last, best=best)
        if resumable:
            self.step_boundary(self.step)

    def show(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        """Write a table of samples of the step, if it has rows, before its metrics are logged."""
        if rows and self.records is not None:
            with self.phases("checkpoint"):
                self.records.show(kind, step, rows)

    def keep_lengths(self, step: int, prompts: Sequence[int], responses: Sequence[int]) -> None:
        """Tokens of each sample that the step was trained on, before its metrics are logged."""
        if self.records is not None:
            with self.phases("checkpoint"):
                self.records.keep_lengths(step, prompts, responses)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record metrics of step `step` (1 is the first; 0 is before training), and what was measured. Collective."""
        with self.phases("checkpoint"):
            metrics = {**metrics, **measure(self.runtime)}
        if self.checkpointer is not None and self.checkpointer.seconds_standing:
            metrics = {**metrics, "seconds_checkpoint": self.checkpointer.seconds_standing}
            self.checkpointer.seconds_standing = 0.0
        self.history.add(step, metrics)
        if self.records is not None:
            with self.phases("checkpoint"):  # a file system that does not answer is a phase that is late
                self.records.metrics.log(step, metrics)
        assert self.progress is not None
        self.progress.step(step, metrics)

    def note(self, message: RenderableType) -> None:
        """Say something on rank 0: a sentence, or a table."""
        assert self.progress is not None
        self.progress.note(message)

    def step_boundary(
        self, step: int, update: int = 0, table: MakeTable | None = None, *, only_to_stop: bool = False
    ) -> None:
        """Mark a point where the run can be saved: after `step` whole steps and `update` optimizer updates of the next
        one, whose content `table` makes when a point is written. Collective.

        only_to_stop: no cadence writes a point here, only a request to stop here or before the next boundary

        Raises: StopRun when the run has been asked to stop, once its state is saved; WatchdogTimeout when the step that
        is done was late.
        """
        assert self.checkpointer is not None
        with self.phases("checkpoint"):
            self.checkpointer.border(Position(step, update), table, only_to_stop=only_to_stop)
        if not update:
            self.phases.raise_if_late()

    def asked_to_stop(self) -> bool:
        """Whether this rank knows of a reason to stop before the next border. Not collective."""
        return self.checkpointer is not None and self.checkpointer.asked_to_stop()

    def stop_now(self, reason: Exception) -> NoReturn:
        """Save the last border, after which nothing has been updated, and end the run. Collective.

        Raises: StopRun.
        """
        assert self.checkpointer is not None
        with self.phases("checkpoint"):
            self.checkpointer.stop_now(reason)

    def stop_if_asked(self) -> None:
        """Between two stages: `stop_now` where any rank has been asked to stop. Nothing in a run without resume points.
        Collective.

        Raises: StopRun.
        """
        if self.checkpointer is None:
            return
        with self.phases("checkpoint"):
            self.checkpointer.stop_if_asked()

    @contextlib.contextmanager
    def stoppable(self, name: str) -> Iterator[None]:
        """The phase `name`, before which, after which and, where it raises Interrupted, within which the run can be
        left. Nothing is updated inside. Collective.

        Raises: StopRun.
        """
        self.stop_if_asked()
        with self.phases(name):
            try:
                yield
            except Interrupted as interrupted:
                self.stop_now(interrupted)
        self.stop_if_asked()

    def export(self, step: int, roles: Sequence[Role], *, last: bool, best: bool = False) -> None:
        """Write Hugging Face directories of the roles when the configuration asks for it, after the last step, and
        where the step is the `best` so far."""
        assert self.exports is not None
        with self.phases("checkpoint"):
            self.exports.maybe_write(step, roles, last=last, best=best)

    @property
    def best_export(self) -> Path | None:
        """Where the export that held-out data chooses is to be found; None: none is chosen."""
        return None if self.exports is None else self.exports.best_place

    def exports_at(self, step: int) -> bool:
        """Whether an export is due there by `checkpoint.export_every`."""
        assert self.exports is not None
        return self.exports.is_due(step)

    def write_report(self, name: str, report: Mapping[str, Any]) -> None:
        """A file of the run directory, whole or not at all, on rank 0; nothing for an empty one."""
        if report and self.runtime.is_main:
            atomic_write(self.run_dir / name, json.dumps(report, indent=2) + "\n")

    def save_boundary(self) -> None:
        """Write a point of the last border, where points are written by any cadence, and wait for it. Collective."""
        assert self.checkpointer is not None
        with self.phases("checkpoint"):
            self.checkpointer.finish(last_border=True)

    def discard_boundary(self) -> None:
        """From here on the weights are no longer those of the last border, although no update has changed them."""
        assert self.checkpointer is not None
        self.checkpointer.discard_boundary()

    def finish(self, stop_reason: str | None, *, keep_state: bool = True) -> None:
        """End the run. Its last boundary is kept as a resume point, from which it can be prolonged. Collective.

        stop_reason: the rule that has ended it, in words; None: no steps are left
        """
        assert self.checkpointer is not None
        assert self.exports is not None
        with self.phases("checkpoint"):
            self.checkpointer.finish(last_border=keep_state)
            self.exports.finish()
        if self.runtime.is_main:
            finish(self.run_dir, self.step, stop_reason or NO_STEPS_LEFT)
        self.note(stop_reason or f"all {self.step} steps done")

    def prepare_training(
        self, training: ResumableState, identity: Identity, claims: Sequence[Claim], notes: list[str], *, resumes: bool
    ) -> int | None:
        """Go on from the newest good resume point, if the run `resumes`, and make what will write points and exports.
        Adds to `notes` what to tell the user. Collective.

        Returns: the train.num_steps of the run that wrote the point.
        Raises: ValueError when there are points and none can be used; nothing has been touched then.
        """

        def still_ours() -> None:
            for claimed in claims:
                if not (claimed.lock.path.exists() or (self.run_dir / CONFIG_FILE).exists()):
                    raise LockError(
                        f"run.dir = {self.run_dir} is no longer the directory of this run: lock and {CONFIG_FILE} are "
                        "gone, so it was moved or removed. Nothing more is written here; to go on, give the command "
                        "with run.dir at its new place"
                    )
                claimed.lock.require_held()

        def write_what_waits() -> None:
            if self.records is not None:
                self.records.flush()

        def provenance(role: str, at: Position) -> Provenance:
            return Provenance(
                command=identity.command,
                role=role,
                run=str(self.run_dir.absolute()),
                step=at.step,
                update=at.update,
                base=identity.base[role],
                reference=training.reference,
                adapter_of=training.adapter_bases.get(role),
                writing=training.writing,
            )

        def saved(oldest: Position) -> None:
            training.on_saved(oldest)
            if self.exports is not None:
                self.exports.saved(oldest)

        states: dict[str, Stateful] = {"history": self.history, **training.states}
        if training.best is not None and training.best.watched is not None:
            states["best"] = training.best
        restored = None
        if resumes:
            restored = restore(self.runtime, self.run_dir, training.roles, states, identity)
        if restored is not None:
            self.resumed, self.start, self._table = True, restored.position, restored.table
            self.step = self.start.step
            identity = replace(identity, base={**identity.base, **restored.base})
            notes += [f"resumed at {restored.position}, from resume/{restored.position.name}", *restored.notes]
            notes += [training.best.forgotten] if training.best is not None and training.best.forgotten else []
        elif resumes:
            again = "; what it had recorded is removed, and what it had exported is set aside"
            notes.append(f"there is no resume point yet: the run begins at step 0{again}")
        self.began_with = identity.digests()
        self.checkpointer = Checkpointer(
            self.runtime,
            self.run_dir,
            training.checkpoint,
            training.roles,
            states,
            identity,
            training.stop,
            note=self.note,
            still_ours=still_ours,
            on_room=write_what_waits,
            on_saved=saved,
            provenance=provenance,
            newest=self.start if self.resumed else None,
            writer=training.writer,
        )
        resumed_at = self.start.step if resumes else None
        self.exports = Exports(self.run_dir, training.checkpoint, self.note, provenance, resumed_at, training.best)
        return restored.num_steps if restored else None


@contextlib.contextmanager
def open_session(
    cfg: FrozenModel,
    run: RunConfig,
    runtime: Runtime,
    command: str,
    total: int,
    notes: Sequence[str] = (),
    training: ResumableState | None = None,
    *,
    phases: Phases | None = None,
) -> Iterator[Session]:
    """Take the run directory, go on from its newest good resume point, open metrics and progress, and say `notes`.

    Whatever can be refused is refused before anything is written: data is read and models are built first, and resume
    points are examined, so that a mistake leaves an earlier run in the directory as it is. Collective.
    """
    with contextlib.ExitStack() as stack:
        session = Session(runtime, run.dir, phases=phases or Phases())
        with session.phases("build"):  # a file system that does not answer is a phase that is late
            _open(session, stack, cfg, run, command, total, notes, training)
        try:
            yield session
        except (WatchdogTimeout, RewardError) as failure:
            agreed = isinstance(failure, RewardError) or failure.agreed  # all ranks are here
            if session.checkpointer is not None and agreed and session.checkpointer.has_progress():
                with session.phases("checkpoint"):
                    session.note(session.checkpointer.save_last_border())
            raise


def _open(
    session: Session,
    stack: contextlib.ExitStack,
    cfg: FrozenModel,
    run: RunConfig,
    command: str,
    total: int,
    notes: Sequence[str],
    training: ResumableState | None,
) -> None:
    """`open_session`, up to the run itself; what `stack` holds ends with the session."""
    claims: list[Claim] = []  # of rank 0
    on_first_rank(lambda: claims.append(claim(cfg, run, command)))
    for claimed in claims:
        stack.callback(claimed.lock.release)
    resumes = from_first_rank(any(claimed.resumes for claimed in claims))
    # What goes on and what has changed has been said by the check before the start.
    notes = [*notes, *(claimed.lock.note for claimed in claims if claimed.lock.note)]
    if training is not None:
        if (number := training.stop.agreed()) is not None:
            does = "goes on with the earlier run" if resumes else "begins"
            raise StopRun(f"stopped ({number.name}) before anything was done; the same command {does}", number)
        identity = identity_of(cfg, run, command, training)
        planned = session.prepare_training(training, identity, claims, notes, resumes=resumes)
        _require_steps_left(session.start, planned, total, run.dir)
        if resumes:
            on_first_rank(lambda: require_readable_records(run.dir))
    on_first_rank(claims[0].start if claims else _nothing)
    if session.checkpointer is not None:
        stack.callback(session.checkpointer.abandon)
    tracker: list[WandbRun] = []  # of rank 0
    if run.wandb.project is not None:
        on_first_rank(lambda: tracker.append(WandbRun(run.dir, run.wandb, cfg.model_dump(mode="json"))))
    if session.runtime.is_main:
        # A run that had no resume point begins again: nothing of its record is kept.
        resume_step = (session.start.step if session.resumed else -1) if resumes else None
        records = open_records(run.dir, resume_step, tracker[0] if tracker else None, lengths=isinstance(cfg, RLConfig))
        session.records = stack.enter_context(records)
        point.remove_leftovers(run.dir)
        if session.resumed:
            point.set_aside(run.dir, session.start)
        if resumes:
            set_exports_aside(run.dir, session.start.step if session.resumed else -1)
            if training is not None and training.best is not None and training.best.watched is not None:
                notes = [*notes, *filter(None, [point_at_best(run.dir, training.best.step)])]
    bar = Progress(command, total, enabled=session.runtime.is_main, start=session.start.step)
    session.progress = stack.enter_context(bar)
    for note in notes:
        session.note(note)


def _require_steps_left(start: Position, planned: int | None, total: int, run_dir: Path) -> None:
    """Raises: ValueError when an earlier run, whose steps were `planned`, is to end where it has been already.

    Its last export, and what else is done after the last step, would be of other steps or missing. A run that was
    killed after its last step, with the same number, has nothing left to do and ends in order.
    """
    if planned is not None and (start > Position(total) or (start == Position(total) and planned != total)):
        raise ValueError(
            f"run.dir = {run_dir} holds a run that has made {start.step} steps"
            + (f" and {start.update} updates of the next one" if start.update else "")
            + f", and train.num_steps = {total} leaves nothing to do; raise train.num_steps above {start.step}, or "
            "name another run.dir"
        )


def _nothing() -> None:
    """Do nothing, as ranks other than the first do."""


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0
