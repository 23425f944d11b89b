"""Resume points on disk: names, manifest, and which of them may be removed.

A point is written under a hidden name and renamed once it holds `MANIFEST.json`, which lists every file with its size
and SHA-256, and has a digest of its own. So a folder with a point's name is complete, unless it was damaged later; that
is noticed before anything is read from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarlhf.atomic_write import sync
from megarlhf.resume.points.file_digest import FileDigest, digest_of

MANIFEST = "MANIFEST.json"
FORMAT = 2
SET_ASIDE = ".passed_over"
_NAME = re.compile(r"step_(\d{6,})(?:_update_(\d{4,}))?")


def shown_step(step: int) -> int:
    """Number by which people know the step that begins when `step` steps are done. The first is 1."""
    return step + 1


@dataclass(frozen=True, order=True)
class Position:
    """Progress of a run."""

    step: int
    """Steps done."""
    update: int = 0
    """Optimizer updates done of the step after them; 0 at the boundary of two steps."""

    @property
    def name(self) -> str:
        return f"step_{self.step:06d}" + (f"_update_{self.update:04d}" if self.update else "")

    def __str__(self) -> str:
        """Last finished thing, such as `step 11`, or `update 3 of step 12`."""
        return f"update {self.update} of step {shown_step(self.step)}" if self.update else f"step {self.step}"


@dataclass(frozen=True)
class Point:
    """A folder with a point's name. It may be damaged."""

    path: Path
    position: Position


def resume_directory(run_dir: Path) -> Path:
    """Folder of a run's points."""
    return run_dir / "resume"


def partial_path(run_dir: Path, position: Position) -> Path:
    """Hidden folder in which a point is written."""
    return resume_directory(run_dir) / f".{position.name}.partial"


def find_points(run_dir: Path) -> list[Point]:
    """The run's points, oldest first."""
    points = []
    directory = resume_directory(run_dir)
    for path in directory.iterdir() if directory.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            points.append(Point(path, Position(int(match[1]), int(match[2] or 0))))
    return sorted(points, key=lambda point: point.position)


def make_room(directory: Path, size: int, spare: Sequence[Point] = ()) -> str | None:
    """Make an empty folder and room for `size` bytes. Returns the reason when that fails, else None.

    spare: points that may be removed, in this order, as many as needed; none where all would not be enough
    """
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        free = shutil.disk_usage(directory).free
        if free + sum(allocated_bytes(old.path) for old in spare) >= size:
            for old in spare:
                if shutil.disk_usage(directory).free >= size:
                    break
                remove(old)
            free = shutil.disk_usage(directory).free
        if free < size:
            directory.rmdir()
            return f"it takes {size / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free at {directory.parent}"
    except OSError as error:
        return str(error)
    return None


def allocated_bytes(folder: Path) -> int:
    """Bytes on the disk of a folder's files. The folder may be removed meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(place, name)).st_blocks * 512
    return size


def write_manifest(directory: Path, body: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
    """The last file of a point; synced, as is the folder. `body`: what is known about the point beside its files."""
    stated = {
        "format": FORMAT,
        **body,
        "files": {name: asdict(file) for name, file in sorted(files.items())},
    }
    text = json.dumps({"manifest": stated, "sha256": _digest(stated)}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")
    sync(directory / MANIFEST)
    for folder, _, _ in os.walk(directory, topdown=False):
        sync(Path(folder))


def commit(directory: Path, final: Path) -> None:
    """Give a complete directory its name. One of that name, which a run has written before, is replaced."""
    if final.exists():
        doomed = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(final, doomed)
        os.rename(directory, final)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        os.rename(directory, final)
    sync(final.parent)


def read_manifest(point: Point) -> dict[str, Any]:
    """Raises: ValueError when it is missing, damaged, or of a format that this version does not read."""
    path = point.path / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stated, digest = dict(content["manifest"]), content["sha256"]
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from None
    if digest != _digest(stated):
        raise ValueError(f"{path} is damaged (its digest differs)")
    if stated.get("format") != FORMAT:
        raise ValueError(f"{path} has format {stated.get('format')!r}; this version reads format {FORMAT}")
    return stated


def damaged_files(point: Point, manifest: Mapping[str, Any], *, part: int = 0, parts: int = 1) -> list[str]:
    """Describe missing and damaged files of a point. Examines share number `part` of `parts`."""
    problems = []
    for name, stated in list(manifest["files"].items())[part::parts]:
        path = point.path / name
        try:
            size = path.stat().st_size
            if size != stated["bytes"]:
                problems.append(f"{name} has {size} bytes, expected {stated['bytes']}")
            elif digest_of(path).sha256 != stated["sha256"]:
                problems.append(f"{name} is damaged (its digest differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems


def superfluous(points: Sequence[Point], *, keep: int, keep_every: int) -> list[Point]:
    """Points that may be removed, oldest first. Kept are the newest `keep`, and the first one at or after each multiple
    of `keep_every` steps (0: none)."""
    first: dict[int, Point] = {}
    if keep_every:
        for point in points:
            first.setdefault(point.position.step // keep_every, point)
        first.pop(0, None)
    return [point for point in points[: max(0, len(points) - keep)] if point not in first.values()]


def remove(point: Point) -> None:
    """Remove a point. It gets a hidden name first, so that a half deleted one is not taken for a damaged point."""
    doomed = point.path.with_name(f".{point.path.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(point.path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(run_dir: Path, newest: Position) -> None:
    """Rename points later than the one that the run resumes from, because they were passed over and their steps are
    done again. They are no longer points; `passed_over` lists them."""
    for later in find_points(run_dir):
        if later.position > newest:
            target = later.path.with_name(f"{later.path.name}{SET_ASIDE}")
            shutil.rmtree(target, ignore_errors=True)
            os.rename(later.path, target)


def passed_over(run_dir: Path) -> list[Point]:
    """Points that `set_aside` has renamed. Their positions have no meaning."""
    return [Point(path, Position(0)) for path in sorted(resume_directory(run_dir).glob(f"step_*{SET_ASIDE}"))]


def leftovers(run_dir: Path) -> list[Path]:
    """Folders that killed writers and removers have left."""
    ends = (".partial", ".replaced", ".deleted")
    return [path for path in resume_directory(run_dir).glob(".step_*") if path.name.endswith(ends)]


def remove_leftovers(run_dir: Path) -> None:
    for path in leftovers(run_dir):
        shutil.rmtree(path, ignore_errors=True)


def _digest(stated: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
