"""Everything of a run but its loop: run directory, metrics, progress, resume points, exports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rich.console import RenderableType

from megarlhf.atomic_write import atomic_write
from megarlhf.errors import Interrupted, OwnCodeError
from megarlhf.memory import trim_heap
from megarlhf.models.role import Role
from megarlhf.observe.records.cost_metrics import measure
from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.records.run_directory import CONFIG_FILE
from megarlhf.observe.records.sample_tables import Kind, Row
from megarlhf.observe.records.step_records import Records
from megarlhf.observe.report.result import closing_lines
from megarlhf.observe.terminal.activity import Activity
from megarlhf.observe.terminal.progress import Progress
from megarlhf.observe.watch.phases import Phases, seconds_of
from megarlhf.provenance import Provenance
from megarlhf.resume.claim.identity import History
from megarlhf.resume.claim.lock import LockError
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, Claim, finish
from megarlhf.resume.points.checkpointer import Checkpointer
from megarlhf.resume.points.point import Position, shown_step
from megarlhf.resume.points.restore import Identity, MakeTable, Table, restore
from megarlhf.resume.points.stateful import Stateful
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.exports import Exports
from megarlhf.trainers.run.observers import Observers, StepSamples
from megarlhf.trainers.run.resumable import ResumableState

TRIM_EVERY = 25
"""Steps after which free memory of the heap is given back, which takes some hundredths of a second."""


class UnfinishedStep(Protocol):
    """A step of several updates, some of which are done."""

    updates: int

    def table(self) -> MakeTable:
        """Function that makes the step's content for a resume point."""
        ...


@dataclass
class Session:
    """An open run. Only rank 0 writes; the other ranks make the same calls."""

    runtime: Runtime
    run_dir: Path
    records: Records | None = None
    """Only on rank 0."""
    progress: Progress | None = None
    history: History = field(default_factory=History)
    resumed: bool = False
    start: Position = field(default_factory=lambda: Position(0))
    """Position at which the run was resumed."""
    step: int = 0
    """Number of steps done, which is the version of the weights."""
    checkpointer: Checkpointer | None = None
    """Writer of resume points, in a run that trains."""
    exports: Exports | None = None
    phases: Phases = field(default_factory=Phases)
    observers: Observers | None = None
    """The user's own metrics and observers, in a run that has any."""
    activity: Activity = field(init=False)
    """Description of the work in progress, for the display."""
    began_with: Mapping[str, str] = field(default_factory=dict)
    """Digests of the run's models and data, by name."""
    _table: Table | None = None

    def __post_init__(self) -> None:
        self.activity = Activity(self.phases)

    def take_unfinished_step(self) -> Table | None:
        """Content of the unfinished step in which the run was left, if any. Only the first call returns it."""
        table, self._table = self._table, None
        return table

    def log_start(self, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics before the first step. Collective."""
        self.log(0, metrics)
        self.step_boundary(0)

    def has_steps_left(self, num_steps: int, stop_reason: str | None) -> bool:
        """Whether the run goes on: its last step is not done, and no rule has ended it."""
        return self.step < num_steps and stop_reason is None

    @property
    def number(self) -> int:
        """Number of the next step, or of the one in progress, as people count: the first is 1."""
        return shown_step(self.step)

    def begin_step(self) -> tuple[int, int]:
        """Begin the next step; returns the number of steps done, and the number of this step."""
        self.phases.begin_step(self.number)
        return self.step, self.number

    def update_boundary(self, state: UnfinishedStep, last: bool) -> None:
        """Mark a point between two updates of a step where the run can be saved.

        After the last update a point is written only if the run is asked to stop before the step is complete. The rest
        of the step, such as its evaluation, is then done after the resume.
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
        samples: Callable[[], StepSamples] | None = None,
        own: Mapping[str, Metric] | None = None,
    ) -> None:
        """Finish the step: record its metrics with rates and seconds, export the roles if that is due, and mark a point
        where the run can be saved. Collective.

        seconds: makes metrics from the seconds of each phase
        around_export: context of the export
        resumable: False if the weights are no longer those with which training would go on
        samples: makes the samples that the user's own metrics and observers see
        own: metrics that the user's own loop has given
        """
        observed = {**(own or {}), **self._observe({**metrics, **(own or {})}, samples)}
        self.step += 1
        rates = self.phases.rates()
        self.log(self.step, {**metrics, **rates, **seconds(self.phases.end_step(self.step))}, observed)
        if is_due(self.step, TRIM_EVERY):
            trim_heap()
        with around_export or contextlib.nullcontext():
            self.export(self.step, roles, last=last, best=best)
        if resumable:
            self.step_boundary(self.step)

    def _observe(
        self, metrics: Mapping[str, Metric], samples: Callable[[], StepSamples] | None
    ) -> Mapping[str, Metric]:
        """Metrics of the user's own functions after the step. Collective."""
        if self.observers is None:
            return {}
        with self.phases("observe"):
            seen = None if samples is None else samples()
            observed = self.observers.after_step(self.number, metrics, seen)
        for warning in self.observers.take_warnings():
            self.note(warning)
        return observed

    def show(self, kind: Kind, number: int, rows: Sequence[Row]) -> None:
        """Write a table of samples of step `number`, if it has rows. Called before the step's metrics are logged."""
        if rows and self.records is not None:
            with self.phases("checkpoint"):
                self.records.show(kind, number, rows)

    def keep_lengths(self, prompts: Sequence[int], responses: Sequence[int], **further: Sequence[int]) -> None:
        """Write the tokens of each sample of the step, and `further` numbers of it. Called before the step's metrics
        are logged."""
        if self.records is not None:
            with self.phases("checkpoint"):
                self.records.keep_lengths(self.number, prompts, responses, **further)

    def log(self, step: int, metrics: Mapping[str, Metric], observed: Mapping[str, Metric] | None = None) -> None:
        """Record metrics, and measured costs, after `step` steps. Collective.

        observed: the user's own metrics, which say nothing about the weights and may depend on time
        """
        with self.phases("checkpoint"):
            metrics = {**metrics, **measure(self.runtime)}
        if self.checkpointer is not None and self.checkpointer.seconds_standing:
            metrics = {**metrics, "seconds_checkpoint": self.checkpointer.seconds_standing}
            self.checkpointer.seconds_standing = 0.0
        self.history.add(step, metrics)
        if taken := sorted(set(observed or ()) & metrics.keys()):
            raise OwnCodeError(f"own metrics have names of ours: {', '.join(taken)}; give them other names")
        metrics = {**metrics, **(observed or {})}
        if self.records is not None:
            with self.phases("checkpoint"):  # the watchdog sees a file system that does not answer
                self.records.metrics.log(step, metrics)
        assert self.progress is not None
        self.progress.step(step, metrics)

    def note(self, message: RenderableType) -> None:
        """Show a sentence or a table on rank 0."""
        assert self.progress is not None
        self.progress.note(message)

    def step_boundary(
        self, step: int, update: int = 0, table: MakeTable | None = None, *, only_to_stop: bool = False
    ) -> None:
        """Mark a point where the run can be saved: after `step` whole steps plus `update` optimizer updates of the next
        one. `table` makes the content of that unfinished step if a point is written. Collective.

        only_to_stop: a point is written only if the run is asked to stop here or before the next boundary

        Raises: StopRun after saving, if the run was asked to stop; WatchdogTimeout if the finished step was late.
        """
        assert self.checkpointer is not None
        with self.phases("checkpoint"):
            self.checkpointer.boundary_reached(Position(step, update), table, only_to_stop=only_to_stop)
        if not update:
            self.phases.raise_if_late()

    def asked_to_stop(self) -> bool:
        """Whether this rank knows a reason to stop before the next boundary. Not collective."""
        return self.checkpointer is not None and self.checkpointer.asked_to_stop()

    def stop_now(self, reason: Exception) -> NoReturn:
        """Save the last boundary, after which nothing was updated, and end the run. Collective. Raises: StopRun."""
        assert self.checkpointer is not None
        with self.phases("checkpoint"):
            self.checkpointer.stop_now(reason)

    def stop_if_asked(self) -> None:
        """Stop between two stages if any rank was asked to; a run without resume points goes on. Collective. Raises:
        StopRun."""
        if self.checkpointer is not None:
            with self.phases("checkpoint"):
                self.checkpointer.stop_if_asked()

    @contextlib.contextmanager
    def stoppable(self, name: str) -> Iterator[None]:
        """Phase `name` in which nothing is updated. The run can stop before it, after it, and inside of it where it
        raises Interrupted. Collective. Raises: StopRun."""
        self.stop_if_asked()
        with self.phases(name):
            try:
                yield
            except Interrupted as interrupted:
                self.stop_now(interrupted)
        self.stop_if_asked()

    def export(self, step: int, roles: Sequence[Role], *, last: bool, best: bool = False) -> None:
        """Export the roles as Hugging Face directories: see `Exports.maybe_write`."""
        assert self.exports is not None
        with self.phases("checkpoint"):
            self.exports.maybe_write(step, roles, last=last, best=best)

    def exports_at(self, step: int) -> bool:
        """Whether an export is due after `step` by `checkpoint.export_every`."""
        assert self.exports is not None
        return self.exports.is_due(step)

    def write_report(self, name: str, report: Mapping[str, Any]) -> None:
        """Write a JSON file of the run directory, complete or not at all, on rank 0; no file for an empty report."""
        if report and self.runtime.is_main:
            atomic_write(self.run_dir / name, json.dumps(report, indent=2) + "\n")

    def save_boundary(self) -> None:
        """Write a point of the last boundary and wait for it, if the run writes points by any cadence. Collective."""
        assert self.checkpointer is not None
        with self.phases("checkpoint"):
            self.checkpointer.finish(last_boundary=True)

    def discard_boundary(self) -> None:
        """Forget the last boundary, because the weights are changed without an update."""
        assert self.checkpointer is not None
        self.checkpointer.discard_boundary()

    def finish(self, stop_reason: str | None, *, keep_state: bool = True) -> None:
        """End the run. Its last boundary is kept as a resume point, from which the run can be prolonged. Collective.

        stop_reason: message of the rule that ended the run; None: no steps are left
        """
        assert self.checkpointer is not None
        assert self.exports is not None
        with self.phases("checkpoint"):
            self.checkpointer.finish(last_boundary=keep_state)
            self.exports.remove_former_best(None)
        if self.runtime.is_main:
            finish(self.run_dir, self.step, stop_reason or NO_STEPS_LEFT)
        self.note(stop_reason or f"all {self.step} steps done")
        if self.runtime.is_main:
            with contextlib.suppress(ValueError, OSError):  # whatever became of the records, the run is done
                for line in closing_lines(self.run_dir):
                    self.note(line)

    def prepare_training(
        self, training: ResumableState, identity: Identity, claims: Sequence[Claim], notes: list[str], *, resumes: bool
    ) -> int | None:
        """Go on from the newest good resume point, if the run `resumes`, and prepare resume points and exports. Adds
        messages to `notes`. Returns the train.num_steps of the run that wrote the point. Collective.

        Raises: ValueError if there are points and none can be used; nothing has been touched then.
        """

        def saved(oldest: Position) -> None:
            training.on_saved(oldest)
            if self.exports is not None:
                self.exports.remove_former_best(oldest.step)

        states: dict[str, Stateful] = {"history": self.history, **training.states}
        if training.best is not None and training.best.watched is not None:
            states["best"] = training.best
        if self.observers is not None and self.observers.has_state:
            states["observers"] = self.observers
        restored = None
        if resumes:
            restored = restore(self.runtime, self.run_dir, training.roles, states, identity, training.tables)
        if restored is not None:
            self.resumed, self.start, self._table = True, restored.position, restored.table
            self.step = self.start.step
            identity = replace(identity, base={**identity.base, **restored.base})
            notes += [f"resumed after {restored.position}, from resume/{restored.position.name}", *restored.notes]
            notes += [training.best.forgotten] if training.best is not None and training.best.forgotten else []
        elif resumes:
            again = "; what it recorded is removed, and what it exported is set aside"
            notes.append(f"there is no resume point yet: the run begins anew{again}")
        self.began_with = identity.digests()
        provenance = partial(self._provenance, training, identity)
        self.checkpointer = Checkpointer(
            self.runtime,
            self.run_dir,
            training.checkpoint,
            training.roles,
            states,
            identity,
            training.stop,
            note=self.note,
            still_ours=partial(self._require_ours, claims),
            on_room=self._flush_records,
            on_saved=saved,
            provenance=provenance,
            newest=self.start if self.resumed else None,
            writer=training.writer,
            tables=training.tables,
        )
        resumed_at = self.start.step if resumes else None
        self.exports = Exports(self.run_dir, training.checkpoint, self.note, provenance, resumed_at, training.best)
        return restored.num_steps if restored else None

    def _provenance(self, training: ResumableState, identity: Identity, role: str, position: Position) -> Provenance:
        """Content of megarlhf.json for a role that is saved at a position."""
        return Provenance(
            command=identity.command,
            role=role,
            run=str(self.run_dir.absolute()),
            step=position.step,
            update=position.update,
            base=identity.base[role],
            reference=training.reference,
            adapter_of=training.adapter_bases.get(role),
            writing=training.writing,
        )

    def _require_ours(self, claims: Sequence[Claim]) -> None:
        """Raises: LockError if the run directory no longer belongs to this process."""
        for claimed in claims:
            if not (claimed.lock.path.exists() or (self.run_dir / CONFIG_FILE).exists()):
                raise LockError(
                    f"run.dir = {self.run_dir} is no longer the directory of this run: lock and {CONFIG_FILE} are "
                    "gone, so it was moved or removed. Nothing more is written here; to go on, give the command with "
                    "run.dir at its new place"
                )
            claimed.lock.require_held()

    def _flush_records(self) -> None:
        if self.records is not None:
            self.records.flush()


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0
