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
    """Rename exports of later steps than `step`, at which a run is resumed, until they are written again. They may come
    from another configuration. `latest` then points to the newest export that is left. For rank 0."""
    root = run_dir / "checkpoints"
    steps = _steps_by_path(root)
    for path in (path for path, exported in steps.items() if exported > step):
        shutil.rmtree(_aside(path), ignore_errors=True)
        path.rename(_aside(path))
    if (root / "latest").is_symlink() and not (root / "latest").exists():
        (root / "latest").unlink()
        if earlier := [path for path, exported in steps.items() if exported <= step]:
            _point_at("latest", earlier[-1])


def point_at_best(run_dir: Path, step: int | None) -> str:
    """Point `checkpoints/best` to the export of `step`, the best of a run that begins or goes on. For rank 0.

    Returns: a message if that export is gone, else "".
    """
    root = run_dir / "checkpoints"
    if step is not None and (export := root / f"step_{step:06d}").is_dir():
        _point_at("best", export)
        return ""
    if (root / "best").is_symlink():
        (root / "best").unlink()
    if step is None:
        return ""
    return (
        f"WARNING: step {step} had the best metrics so far, and its export is gone: checkpoints/best appears again "
        "after the next evaluation that is better"
    )


def _steps_by_path(root: Path) -> dict[Path, int]:
    """Steps of the exports in `root`, by path, oldest first."""
    return {path: int(match[1]) for path in sorted(root.glob("step_*")) if (match := _NAME.fullmatch(path.name))}


def _aside(export: Path) -> Path:
    return export.with_name(f"{export.name}{SET_ASIDE}")


class Exports:
    """Exports of one run. Those of later steps than `resumed_at`, written by a killed process, are replaced when the
    run reaches these steps again. Collective."""

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
        steps = {} if resumed_at is None else _steps_by_path(self._root)
        self._written = [path for path, step in steps.items() if step <= (resumed_at or 0)]
        """Exports of this run, oldest first; `checkpoint.export_keep` counts and removes only these."""
        self._replaceable = resumed_at is not None

    @property
    def best_path(self) -> Path | None:
        """Link to the export of the best step; None if no step is chosen."""
        return None if self._best.watched is None else self._root / "best"

    def is_due(self, step: int) -> bool:
        """Whether an export is due by `checkpoint.export_every`."""
        every = self._cfg.export_every
        return bool(every) and step % every == 0

    def maybe_write(self, step: int, roles: Sequence[Role], *, last: bool, best: bool = False) -> None:
        """Export the roles if the configuration asks for it, after the last step, or if the step is the `best` so far.

        Raises: ExportError if the last export fails. An earlier failure is only noted.
        """
        if not (last or best or self.is_due(step)):
            return
        try:
            provenance = {role.name: self._provenance(role.name, Position(step)) for role in roles}
            self._written.append(save_roles(self._root, step, roles, provenance, replace=self._replaceable))
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
            self._note(f"{self._best.description}: {self._root / 'best'}")
        self._forget_old()

    def remove_former_best(self, oldest: int | None) -> None:
        """Remove exports that were kept only for being the best once.

        oldest: step of the oldest resume point; None: the run is finished
        """
        for step in self._best.release(oldest):
            path = self._root / f"step_{step:06d}"
            self._written = [export for export in self._written if export != path]
            self._remove(path)
        self._forget_old()

    def _forget_old(self) -> None:
        """Remove old exports by `checkpoint.export_keep`, which does not count those kept only for being the best."""
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
    """Export each role to `root/step_NNNNNN/ROLE`, complete or not at all, and point `root/latest` to it.

    Collective. The step's directory appears by a rename after every role is written. Returns it. `replace`: an export
    that the same run left under that name may be replaced. `provenance`: written beside the weights, by role.

    Raises: ValueError, on every rank and before anything is written, if something else has that name; ExportError, on
    every rank, if the disk or the model's directory does not allow it. Then nothing is left.
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
    """Make the folder to export to. Raises: ValueError if one of the two names is in use."""
    if replace and partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    for path in (partial,) if replace and final.is_dir() and not final.is_symlink() else (final, partial):
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ValueError(
                f"{path} is there, and this run did not write it: another run saves here, or somebody put it there. "
                "Nothing is replaced; move it away, or give this run a run.dir of its own"
            )
    partial.mkdir(parents=True, exist_ok=True)


def _publish(root: Path, final: Path, partial: Path) -> None:
    """Give the export its name and point `root/latest` to it, each by one rename."""
    replaced = root / f".{final.name}.replaced"
    if final.exists() and any(final.iterdir()):
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)  # fails on a directory that holds anything
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(_aside(final), ignore_errors=True)
    _point_at("latest", final)


def _point_at(name: Literal["latest", "best"], export: Path) -> None:
    with atomic_path(export.parent / name, synced=False) as link:
        link.unlink(missing_ok=True)
        link.symlink_to(export.name)
