"""What every command's run has besides its loop: run directory, metrics, progress, resume points, exports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import RenderableType

from megarlhf.config import CheckpointConfig, FrozenModel, RunConfig
from megarlhf.models.role import Role
from megarlhf.observe.metrics import Metric, MetricsWriter
from megarlhf.observe.progress import Progress
from megarlhf.resume.checkpointer import Checkpointer
from megarlhf.resume.claiming import Claim, changes_since, claimed, finish
from megarlhf.resume.identity import History
from megarlhf.resume.point import Position
from megarlhf.resume.restore import Identity, Table, restore
from megarlhf.resume.signals import StopRequest
from megarlhf.resume.state import Stateful
from megarlhf.runtime import Runtime
from megarlhf.trainers.exports import Exports


@dataclass(frozen=True)
class Training:
    """What a run that trains hands in, so that it can be resumed."""

    checkpoint: CheckpointConfig
    roles: Sequence[Role]
    """The trained ones."""
    data: str
    """Digest of the training samples."""
    states: Mapping[str, Stateful] = field(default_factory=dict)
    """Whatever keeps state over steps, by name."""
    reference: str | None = None
    """Digest of the reference's weights."""


@dataclass
class Session:
    """An open run. Only rank 0 writes; the others go through the same calls."""

    runtime: Runtime
    run_dir: Path
    metrics: MetricsWriter | None = None
    """On rank 0."""
    progress: Progress | None = None
    early_notes: list[str] = field(default_factory=list)
    """What was to be said before there was a progress bar."""
    history: History = field(default_factory=History)
    resumed: bool = False
    start: Position = field(default_factory=lambda: Position(0))
    """How far the run was when it was resumed."""
    checkpointer: Checkpointer | None = None
    """Of a run that trains."""
    exports: Exports | None = None
    _table: Table | None = None

    def take_table(self) -> Table | None:
        """What describes the step in which `start` lies, if it lies in one; asked again, nothing."""
        table, self._table = self._table, None
        return table

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of step `step` (1 is the first; 0 is before training)."""
        if self.checkpointer is not None and self.checkpointer.seconds_standing:
            metrics = {**metrics, "seconds_checkpoint": self.checkpointer.seconds_standing}
            self.checkpointer.seconds_standing = 0.0
        self.history.add(step, metrics)
        if self.metrics is not None:
            self.metrics.log(step, metrics)
        assert self.progress is not None
        self.progress.step(step, metrics)

    def note(self, message: RenderableType) -> None:
        """Say something on rank 0: a sentence, or a table."""
        if self.progress is None:
            self.early_notes.append(str(message))
        else:
            self.progress.note(message)

    def border(self, step: int, update: int = 0, table: Table | None = None) -> None:
        """`step` steps are done, and `update` optimizer updates of the next one, which `table` describes. Collective.

        Raises: StopRun when the run has been asked to stop, once its state is saved.
        """
        assert self.checkpointer is not None
        self.checkpointer.border(Position(step, update), table)

    def export(self, step: int, roles: Sequence[Role], *, last: bool) -> None:
        """Write Hugging Face directories of the roles when the configuration asks for it, and after the last step."""
        assert self.exports is not None
        self.exports.maybe_write(step, roles, last=last)

    def finish(self, step: int, reason: str, *, keep_state: bool = True) -> None:
        """The run is finished; its last border is kept as a resume point, from which it can be prolonged."""
        assert self.checkpointer is not None
        self.checkpointer.finish(last_border=keep_state)
        if self.runtime.is_main:
            finish(self.run_dir, step, reason)
        self.note(reason)


@contextlib.contextmanager
def open_session(
    cfg: FrozenModel,
    run: RunConfig,
    runtime: Runtime,
    command: str,
    total: int,
    notes: Sequence[str] = (),
    training: Training | None = None,
) -> Iterator[Session]:
    """Take the run directory, go on from its newest good resume point, open metrics and progress, and say `notes`.

    Whatever can be refused is refused before anything is written: data is read and models are built first, and resume
    points are examined, so that a mistake leaves an earlier run in the directory as it is. Collective.
    """
    with contextlib.ExitStack() as stack:
        claim = stack.enter_context(claimed(cfg, run, command))
        session = Session(runtime, run.dir)
        resumed_at = None
        if training is not None:
            resumed_at = _train(session, cfg, run, command, training, claim, stack.enter_context(StopRequest()))
        claim.commit()
        if runtime.is_main:
            # A run that had no resume point yet begins again: nothing of its record is kept.
            resume_step = None if not claim.resumes else -1 if resumed_at is None else resumed_at
            project = "megarlhf" if run.logger == "wandb" else None
            writer = MetricsWriter(run.dir, wandb_project=project, resume_step=resume_step)
            session.metrics = stack.enter_context(writer)
        bar = Progress(command, total, enabled=runtime.is_main, start=session.start.step)
        session.progress = stack.enter_context(bar)
        for note in (*notes, *claim.notes):
            session.note(note)
        for early in session.early_notes:
            session.note(early)
        yield session


def _train(
    session: Session,
    cfg: FrozenModel,
    run: RunConfig,
    command: str,
    training: Training,
    claim: Claim,
    stop: StopRequest,
) -> int | None:
    """Make what writes resume points and exports, and go on from the newest good one; returns the step, if any."""
    states: dict[str, Stateful] = {"history": session.history, **training.states}
    identity = Identity(
        command=command,
        data=training.data,
        reference=training.reference,
        config=cfg.model_dump(mode="json"),
        changed=lambda before: changes_since(before, cfg),
        allow_changes=run.allow_changes,
    )
    session.checkpointer = Checkpointer(
        session.runtime,
        run.dir,
        training.checkpoint,
        training.roles,
        states,
        identity,
        stop,
        note=session.note,
        still_ours=claim.require_held,
    )
    restored = restore(session.runtime, run.dir, training.roles, states, identity) if claim.resumes else None
    if restored is not None:
        session.resumed, session.start, session._table = True, restored.position, restored.table
        session.checkpointer.began_at(restored.position)
        session.note(f"goes on from resume point {restored.position.name}")
        for note in restored.notes:
            session.note(note)
    elif claim.resumes:
        session.note("the earlier start wrote no resume point: the run begins at step 0")
    resumed_at = session.start.step if claim.resumes else None
    session.exports = Exports(run.dir, training.checkpoint, session.note, resumed_at)
    return session.start.step if restored is not None else None


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0
