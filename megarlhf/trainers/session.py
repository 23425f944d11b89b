"""What every command's run has besides its loop: run directory, metrics, progress, checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from rich.console import RenderableType

from megarlhf.collective_errors import on_first_rank
from megarlhf.config import CheckpointConfig, FrozenModel, RunConfig
from megarlhf.models.role import Role
from megarlhf.observe.metrics import Metric, MetricsWriter
from megarlhf.observe.progress import Progress
from megarlhf.resume.claim import Claim, claim
from megarlhf.runtime import Runtime


@dataclass(frozen=True)
class Session:
    """An open run. Only rank 0 writes; the others go through the same calls."""

    runtime: Runtime
    run_dir: Path
    metrics: MetricsWriter | None
    """On rank 0."""
    progress: Progress
    checkpoint: CheckpointConfig
    written: list[Path] = field(default_factory=list)
    """Checkpoints of this run, oldest first; `checkpoint.keep` counts and removes only these."""

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of step `step` (1 is the first; 0 is before training)."""
        if self.metrics is not None:
            self.metrics.log(step, metrics)
        self.progress.step(step, metrics)

    def note(self, message: RenderableType) -> None:
        """Say something on rank 0: a sentence, or a table."""
        self.progress.note(message)

    def maybe_save(self, step: int, roles: Sequence[Role], *, last: bool) -> None:
        """Export the trained roles when the configuration asks for it, and after the last step."""
        if last or (self.checkpoint.every and step % self.checkpoint.every == 0):
            self.written.append(save_roles(self.run_dir / "checkpoints", step, roles))
            self.note(f"saved {self.written[-1]}")
            while self.checkpoint.keep and len(self.written) > self.checkpoint.keep:
                oldest = self.written.pop(0)
                if self.runtime.is_main:
                    shutil.rmtree(oldest)


@contextlib.contextmanager
def open_session(
    cfg: FrozenModel,
    run: RunConfig,
    checkpoint: CheckpointConfig,
    runtime: Runtime,
    title: str,
    total: int,
    notes: Sequence[str] = (),
) -> Iterator[Session]:
    """Make the run directory, write the resolved configuration, open metrics and progress, and say `notes`.

    Whatever can be refused is refused before: data is read and models are built first, so that a mistake leaves no
    trace of a run, and an earlier run in the directory as it is. Collective: rank 0 decides about the directory.
    """
    claims: list[Claim] = []
    on_first_rank(lambda: claims.append(_start(cfg, run, title)))
    project = "megarlhf" if run.logger == "wandb" else None
    with contextlib.ExitStack() as stack:
        for claimed in claims:
            stack.callback(claimed.lock.release)
        metrics = stack.enter_context(MetricsWriter(run.dir, wandb_project=project)) if runtime.is_main else None
        progress = stack.enter_context(Progress(title, total, enabled=runtime.is_main))
        for note in [*notes, *(note for claimed in claims for note in claimed.notes)]:
            progress.note(note)
        yield Session(runtime=runtime, run_dir=run.dir, metrics=metrics, progress=progress, checkpoint=checkpoint)


def _start(cfg: FrozenModel, run: RunConfig, command: str) -> Claim:
    claimed = claim(cfg, run, command)
    try:
        if claimed.resumes:  # until resume points exist
            raise ValueError(f"run.dir = {run.dir} holds an earlier run, and there is no resume yet; name another one")
        claimed.start()
    except BaseException:
        claimed.lock.release()
        raise
    return claimed


def _name(step: int) -> str:
    return f"step_{step:06d}"


def save_roles(root: Path, step: int, roles: Sequence[Role]) -> Path:
    """Export each role to `root/step_NNNNNN/ROLE`, complete or not at all, and point `root/latest` at it.

    Collective. The step's directory appears by a rename after every role is written. Returns it.

    Raises: ValueError, on every rank and before anything is written, when something stands under that name.
    """
    final, partial = root / _name(step), root / f".{_name(step)}.partial"
    on_first_rank(lambda: _make_room(final, partial))
    for role in roles:
        role.export(partial / role.name)
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(final)  # fails on a directory that holds anything
        _point_latest(root, final)
    dist.barrier()
    return final


def _make_room(final: Path, partial: Path) -> None:
    """Make the folder to export to. Raises: ValueError when one of the two names is in use."""
    for path in (final, partial):
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ValueError(
                f"{path} is there, and this run did not write it: another run saves here, or somebody put it there; "
                "nothing is replaced. Move it away, or give this run a run.dir of its own"
            )
    partial.mkdir(parents=True, exist_ok=True)


def _point_latest(root: Path, target: Path) -> None:
    """`root/latest` names the newest checkpoint; replaced in one rename."""
    link = root / ".latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, root / "latest")


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0
