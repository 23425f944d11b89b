"""Exports: the trained roles as Hugging Face directories, `checkpoints/step_NNNNNN/ROLE`, `checkpoints/latest`, and
`checkpoints/best`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch.distributed as dist

from megarlhf.atomic_write import atomic_path, sync
from megarlhf.collective_errors import on_first_rank, raise_on_all_ranks
from megarlhf.config import CheckpointConfig
from megarlhf.models.role import Role
from megarlhf.provenance import FILE, Provenance
from megarlhf.resume.points.point import SET_ASIDE, Position
from megarlhf.trainers.run.best_checkpoint import Best

_NAME = re.compile(r"step_(\d{6,})")


class ExportError(RuntimeError):
    """Exports could not be written."""


def set_exports_aside(run_dir: Path, step: int) -> None:
    """Exports of later steps than the one that a run goes on after, until they are written again: `latest` is of the
    run as it goes on, and the others may be of another configuration. For rank 0."""
    root = run_dir / "checkpoints"
    steps = {path: int(match[1]) for path in sorted(root.glob("step_*")) if (match := _NAME.fullmatch(path.name))}
    for path in (path for path, its_step in steps.items() if its_step > step):
        shutil.rmtree(_aside(path), ignore_errors=True)
        path.rename(_aside(path))
    if (root / "latest").is_symlink() and not (root / "latest").exists():
        (root / "latest").unlink()
        earlier = [path for path, its_step in steps.items() if its_step <= step]
        if earlier:
            _point_at("latest", earlier[-1])


def point_at_best(run_dir: Path, step: int | None) -> str:
    """`checkpoints/best` of a run that begins or goes on; `step`: which it knows as the best. For rank 0.

    Returns: what to tell the user, where that export is gone.
    """
    root = run_dir / "checkpoints"
    if step is not None and (export := root / f"step_{step:06d}").is_dir():
        _point_at("best", export)
        return ""
    if (root / "best").is_symlink():
        (root / "best").unlink()
    lost = f"WARNING: step {step} had the best figures so far, and its export is gone: checkpoints/best comes with the"
    return "" if step is None else f"{lost} next evaluation that is better"


def _aside(export: Path) -> Path:
    return export.with_name(f"{export.name}{SET_ASIDE}")


class Exports:
    """Exports of one run. Exports of later steps than `resumed_at`, which a killed process has written, are replaced
    when the run comes there again. Collective."""

    def __init__(
        self,
        run_dir: Path,
        cfg: CheckpointConfig,
        note: Callable[[str], None],
        provenance: Callable[[str, Position], Provenance],
        resumed_at: int | None = None,
        best: Best | None = None,
    ) -> None:
        self._root, self._cfg, self._note = run_dir / "checkpoints", cfg, note
        self._provenance = provenance
        self._best = best or Best(None, "")
        earlier = sorted(self._root.iterdir()) if resumed_at is not None and self._root.is_dir() else []
        steps = {path: int(match[1]) for path in earlier if (match := _NAME.fullmatch(path.name))}
        self._written = [path for path, step in steps.items() if step <= (resumed_at or 0)]
        """Exports of this run, oldest first; `checkpoint.export_keep` counts and removes only these."""
        self._replaceable = resumed_at is not None

    @property
    def best_place(self) -> Path | None:
        """The link to the export of the best step; None where none is chosen."""
        return None if self._best.watched is None else self._root / "best"

    def is_due(self, step: int) -> bool:
        """By `checkpoint.export_every`."""
        every = self._cfg.export_every
        return bool(every) and step % every == 0

    def maybe_write(self, step: int, roles: Sequence[Role], *, last: bool, best: bool = False) -> None:
        """Where the configuration asks for it, after the last step, and where the step is the `best` so far.

        Raises: ExportError when the last one could not be written; of an earlier one that is only said.
        """
        if not (last or best or self.is_due(step)):
            return
        try:
            stated = {role.name: self._provenance(role.name, Position(step)) for role in roles}
            self._written.append(save_roles(self._root, step, roles, stated, replace=self._replaceable))
        except ExportError as error:
            if last:
                raise
            self._note(f"WARNING: no export of step {step}: {error}. The run goes on")
            return
        self._note(f"saved {self._written[-1]}")
        if best:
            self._best.take(step, only=not (last or self.is_due(step)))
            if dist.get_rank() == 0:
                _point_at("best", self._written[-1])
            self._note(f"{self._best.words}: {self._root / 'best'}")
        self._forget_old()

    def saved(self, oldest: Position) -> None:
        """No resume point is left that is older than `oldest`. For rank 0."""
        self._remove_spent(oldest.step)

    def finish(self) -> None:
        """The run is finished."""
        self._remove_spent(None)

    def _remove_spent(self, oldest: int | None) -> None:
        """Remove exports that were the best once and nothing else asks for."""
        for step in self._best.release(oldest):
            path = self._root / f"step_{step:06d}"
            self._written = [each for each in self._written if each != path]
            self._remove(path)
        self._forget_old()

    def _forget_old(self) -> None:
        """By `checkpoint.export_keep`. Those that are there for being the best only do not count."""
        needed = {self._root / f"step_{step:06d}": only for step, only in self._best.needed().items()}
        counted = [path for path in self._written if not needed.get(path, False)]
        for path in counted[: -self._cfg.export_keep] if self._cfg.export_keep else []:
            if path not in needed:
                self._written.remove(path)
                self._remove(path)

    def _remove(self, export: Path) -> None:
        latest = self._root / "latest"
        if dist.get_rank() == 0 and export.resolve() != latest.resolve():
            shutil.rmtree(export, ignore_errors=True)


def save_roles(
    root: Path,
    step: int,
    roles: Sequence[Role],
    provenance: Mapping[str, Provenance] = MappingProxyType({}),
    *,
    replace: bool = False,
) -> Path:
    """Export each role to `root/step_NNNNNN/ROLE`, complete or not at all, and point `root/latest` at it.

    Collective. The step's directory appears by a rename after every role is written. Returns it. `replace`: what the
    same run has left under that name may be replaced. `provenance`: by role, what is stated beside its weights.

    Raises: ValueError, on every rank and before anything is written, when something else stands under that name;
    ExportError, on every rank, when the disk or the model's directory does not allow it; nothing is left then.
    """
    final, partial = root / f"step_{step:06d}", root / f".step_{step:06d}.partial"
    on_first_rank(lambda: _make_room(final, partial, replace))
    try:
        for role in roles:
            with raise_on_all_ranks(lambda reasons: ExportError("; ".join(reasons))):
                role.export(partial / role.name)
        with raise_on_all_ranks(lambda reasons: ExportError("; ".join(reasons))):
            if dist.get_rank() == 0:
                for role in roles:
                    for name in role.export_names if role.name in provenance else ():
                        (partial / name / FILE).write_text(provenance[role.name].to_json(), encoding="utf-8")
                        sync(partial / name / FILE)
                _publish(root, final, partial)
    except ExportError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _make_room(final: Path, partial: Path, replace: bool) -> None:
    """Make the folder to export to. Raises: ValueError when one of the two names is in use, or cannot be made."""
    if replace and partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    for path in (partial,) if replace and final.is_dir() and not final.is_symlink() else (final, partial):
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ValueError(
                f"{path} is there, and this run did not write it: another run saves here, or somebody put it there; "
                "nothing is replaced. Move it away, or give this run a run.dir of its own"
            )
    partial.mkdir(parents=True, exist_ok=True)


def _publish(root: Path, final: Path, partial: Path) -> None:
    """The export gets its name, and `root/latest` names it; each in one rename."""
    doomed = root / f".{final.name}.replaced"
    if final.exists() and any(final.iterdir()):
        shutil.rmtree(doomed, ignore_errors=True)
        final.rename(doomed)
    partial.rename(final)  # fails on a directory that holds anything
    shutil.rmtree(doomed, ignore_errors=True)
    shutil.rmtree(_aside(final), ignore_errors=True)
    _point_at("latest", final)


def _point_at(name: Literal["latest", "best"], export: Path) -> None:
    with atomic_path(export.parent / name, synced=False) as link:
        link.unlink(missing_ok=True)
        link.symlink_to(export.name)
