"""Opening of a run: claims the run directory, goes on from its newest good resume point, starts its records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarlhf.collective_errors import from_first_rank, on_first_rank
from megarlhf.config import FrozenModel, RLConfig, RunConfig
from megarlhf.errors import OwnCodeError, RewardError, WatchdogTimeout
from megarlhf.observe.records.step_records import open_records, require_readable_records
from megarlhf.observe.records.wandb_run import WandbRun
from megarlhf.observe.terminal.progress import Progress
from megarlhf.observe.watch.phases import Phases
from megarlhf.resume.claim.config_changes import TrainingConfig
from megarlhf.resume.claim.on_existing import Claim, claim
from megarlhf.resume.points import point
from megarlhf.resume.points.point import Position
from megarlhf.resume.signals import StopRun
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.exports import point_at_best, set_exports_aside
from megarlhf.trainers.run.observers import Observers
from megarlhf.trainers.run.resumable import ResumableState, identity_of
from megarlhf.trainers.run.session import Session


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
    """Claim the run directory, go on from its newest good resume point, open metrics and progress, and show `notes`.

    All checks come before anything is written: data has been read, models are built, and resume points are examined. So
    a mistake leaves an earlier run in the directory as it is. Collective.
    """
    with contextlib.ExitStack() as stack:
        session = Session(runtime, run.dir, phases=phases or Phases())
        with session.phases("build"):  # the watchdog sees a file system that does not answer
            _open(session, stack, cfg, run, command, total, notes, training)
        try:
            yield session
        except (WatchdogTimeout, RewardError, OwnCodeError) as failure:
            agreed = not isinstance(failure, WatchdogTimeout) or failure.agreed  # all ranks are here
            if session.checkpointer is not None and agreed and session.checkpointer.has_progress():
                with session.phases("checkpoint"):
                    session.note(session.checkpointer.save_last_boundary())
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
    """Open the session; `stack` closes its parts when it ends."""
    claims: list[Claim] = []  # one on rank 0, none on the others
    on_first_rank(lambda: claims.append(claim(cfg, run, command)))
    for claimed in claims:
        stack.callback(claimed.lock.release)
    resumes = from_first_rank(any(claimed.resumes for claimed in claims))
    notes = [*notes, *(claimed.lock.note for claimed in claims if claimed.lock.note)]
    if training is not None:
        if (number := training.stop.agreed()) is not None:
            again = "goes on with the earlier run" if resumes else "begins"
            raise StopRun(f"stopped ({number.name}) before anything was done; the same command {again}", number)
        assert isinstance(cfg, TrainingConfig)
        if cfg.observe.paths:
            session.observers = Observers(cfg.observe, command, is_main=session.runtime.is_main)
        identity = identity_of(cfg, run, command, training)
        planned = session.prepare_training(training, identity, claims, notes, resumes=resumes)
        _require_steps_left(session.start, planned, total, run.dir)
        if resumes:
            on_first_rank(lambda: require_readable_records(run.dir))
    on_first_rank(lambda: claims[0].start())
    if session.checkpointer is not None:
        stack.callback(session.checkpointer.abandon)
    tracker: list[WandbRun] = []  # on rank 0
    if run.wandb.project is not None:
        on_first_rank(lambda: tracker.append(WandbRun(run.dir, run.wandb, cfg.model_dump(mode="json"))))
    if session.runtime.is_main:
        # Without a resume point the run begins again, and its earlier records are removed.
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
    progress = Progress(
        command, total, enabled=session.runtime.is_main, start=session.start.step, activity=session.activity.text
    )
    session.progress = stack.enter_context(progress)
    for note in notes:
        session.note(note)


def _require_steps_left(start: Position, planned: int | None, total: int, run_dir: Path) -> None:
    """Raises: ValueError if an earlier run, of `planned` steps, has already passed the step where it is to end now.

    Its last export and other work after the last step would then be missing or come from other steps. A run that was
    killed after its last step, with the same number of steps, has nothing left to do and ends in order.
    """
    if planned is not None and (start > Position(total) or (start == Position(total) and planned != total)):
        raise ValueError(
            f"run.dir = {run_dir} holds a run that has made {start.step} steps"
            + (f" and {start.update} updates of the next one" if start.update else "")
            + f", and train.num_steps = {total} leaves nothing to do; raise train.num_steps above {start.step}, or "
            "name another run.dir"
        )
