"""Exports: the trained roles as Hugging Face directories, `checkpoints/step_NNNNNN/ROLE`, and `checkpoints/latest`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from megarlhf.collective_errors import on_first_rank, raise_on_all_ranks
from megarlhf.config import CheckpointConfig
from megarlhf.models.role import Role
from megarlhf.provenance import FILE, Provenance
from megarlhf.resume.point import SET_ASIDE, Position
from megarlhf.weights.checkpoint.staging import sync

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
            _point_latest_at(earlier[-1])


def _aside(export: Path) -> Path:
    return export.with_name(f"{export.name}{SET_ASIDE}")


class Exports:
    """Of one run. Those of later steps than `resumed_at`, which a killed process has written, are replaced when the
    run comes there again. Collective."""

    def __init__(
        self,
        run_dir: Path,
        cfg: CheckpointConfig,
        note: Callable[[str], None],
        provenance: Callable[[str, Position], Provenance],
        resumed_at: int | None = None,
    ) -> None:
        self._root, self._cfg, self._note = run_dir / "checkpoints", cfg, note
        self._provenance = provenance
        earlier = sorted(self._root.iterdir()) if resumed_at is not None and self._root.is_dir() else []
        steps = {path: int(match[1]) for path in earlier if (match := _NAME.fullmatch(path.name))}
        self._written = [path for path, step in steps.items() if step <= (resumed_at or 0)]
        """Exports of this run, oldest first; `checkpoint.export_keep` counts and removes only these."""
        self._replaceable = resumed_at is not None

    def is_due(self, step: int) -> bool:
        """By `checkpoint.export_every`."""
        every = self._cfg.export_every
        return bool(every) and step % every == 0

    def maybe_write(self, step: int, roles: Sequence[Role], *, last: bool) -> None:
        """Where the configuration asks for it, and after the last step.

        Raises: ExportError when the last one could not be written; of an earlier one that is only said.
        """
        if not last and not self.is_due(step):
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
        while self._cfg.export_keep and len(self._written) > self._cfg.export_keep:
            oldest = self._written.pop(0)
            if dist.get_rank() == 0:
                shutil.rmtree(oldest, ignore_errors=True)


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
    _point_latest_at(final)


def _point_latest_at(export: Path) -> None:
    link = export.parent / ".latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(export.name)
    os.replace(link, export.parent / "latest")
