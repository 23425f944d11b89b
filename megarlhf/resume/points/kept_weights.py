"""Saves a role's weights before a skipped optimizer step: a resume point of this role alone, without its optimizer.

A skipped step changes no weight, so they can be saved after it was skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.collective_errors import from_first_rank
from megarlhf.models.role import Role
from megarlhf.resume.points import point, sharded_state
from megarlhf.resume.points.file_digest import FileDigest
from megarlhf.resume.points.point import Point, Position
from megarlhf.resume.points.restore import gather_damaged_files, layout_in_words
from megarlhf.resume.points.writer import Content, PointWriter, WriteOutcome
from megarlhf.runtime import Runtime


@dataclass(frozen=True)
class KeptWeights:
    """A folder with a role's weights."""

    directory: Path
    updates: int
    """Optimizer updates of the role that this process had made then."""


def keep_weights(
    role: Role, directory: Path, body: Mapping[str, Any], newest: KeptWeights | None
) -> tuple[KeptWeights | None, str]:
    """Write the role's weights to `directory`, which appears complete or not at all. Collective.

    body:   content of the manifest beside the role
    newest: weights saved earlier; their files are linked where the weights are the same

    Returns: the folder, or None and why it could not be written, in words; the same on every rank.
    """
    assert role.trainer is not None
    kept = KeptWeights(directory, role.trainer.updates)
    same = newest is not None and newest.updates == kept.updates
    if same and from_first_rank(role.mesh.runtime.is_main and _linked(newest.directory, directory)):  # type: ignore[union-attr]
        return kept, ""
    stated = {**sharded_state.counters(role), "layout": layout_in_words(role)}
    error = _write(role, directory, {**body, "roles": {role.name: stated}})
    return (None, error) if error else (kept, "")


def find_weights(runtime: Runtime, kept: Path, run_dir: Path, role: str, counters: Mapping[str, Any]) -> Path:
    """Find the weights of `role` before the skipped step: in `kept`, or in a resume point of the run at which the role
    had made as many optimizer steps. Every file's digest is compared. Collective.

    Raises: ValueError when there are none; the message lists what was examined.
    """
    candidates: list[Point] = from_first_rank(
        [Point(kept, Position(0)), *reversed(point.find_points(run_dir))] if runtime.is_main else []
    )
    examined = []
    for candidate in candidates:
        manifest, problem = _manifest(runtime, candidate, role, counters)
        if not problem:
            problem = "; ".join(gather_damaged_files(runtime, candidate, manifest)[:5])
        if not problem:
            return candidate.path
        examined.append(f"{candidate.path}: {problem}")
    raise ValueError(
        "\n  ".join([f"the weights of {role} before the step are not there:", *examined])
        + f"\nA repeat needs them as they were after {counters['optimizer_steps']} optimizer step(s). A run keeps them "
        "when it skips a step, if there is room on the disk; make room, and start the run again by the same command: "
        "it comes to the same step"
    )


def _manifest(
    runtime: Runtime, candidate: Point, role: str, counters: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str]:
    """Manifest of a point, and why the point does not fit `counters`; the same on every rank."""
    manifest: Mapping[str, Any] = {}
    problem = ""
    if runtime.is_main:
        try:
            manifest = point.read_manifest(candidate)
            stated = manifest["roles"].get(role, {})
            if any(stated.get(name) != value for name, value in counters.items()):
                made = stated.get("optimizer_steps", "no")
                problem = f"{role} had made {made} optimizer step(s) there, not {counters['optimizer_steps']}"
        except (ValueError, KeyError) as error:
            problem = str(error)
    return from_first_rank((manifest, problem))


def _write(role: Role, directory: Path, body: Mapping[str, Any]) -> str:
    """Write the weights. Returns the reason when that fails, else an empty text."""
    runtime = role.mesh.runtime
    role.parts.to_learn()  # the gradients are still wanted
    state = sharded_state.sharded_state(role, optimizer=False)
    size = torch.tensor(sharded_state.bytes_to_write(state), device=runtime.device)
    dist.all_reduce(size)
    partial = directory.with_name(f".{directory.name}.partial")
    room = int(size) + int(size) // 50 + (1 << 20)
    reason = from_first_rank(point.make_room(partial, room) if runtime.is_main else None)
    if reason is not None:
        return reason

    def complete(files: Mapping[str, FileDigest]) -> None:
        point.write_manifest(partial, body, files)
        point.commit(partial, directory)

    writer = PointWriter(runtime)
    commons = {role.name: sharded_state.common(role, int(body["step"]))}
    writer.start(partial, Content({role.name: state}, commons, {}), complete)
    outcome: WriteOutcome | None = None
    try:
        while outcome is None:
            outcome = writer.poll(wait=True)
    finally:
        writer.abandon()
    return outcome.error or ""


def _linked(source: Path, target: Path) -> bool:
    """Link every file of `source` into `target`. False on file systems without hard links."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):
        with contextlib.suppress(OSError):
            shutil.rmtree(target)
        return False
    return True
