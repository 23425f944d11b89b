"""A file with one JSON object per line and step. A run appends to it; a resume cuts it back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarlhf.atomic_write import atomic_write

log = logging.getLogger(__name__)


class StepLines:
    """Writes the lines of one run.

    path:        the file; its directory is made if missing
    resume_step: the last step of the resumed checkpoint. Lines of later steps are cut, and so is a last line torn by a
                 crash. None starts a new file.

    Raises: ValueError when the file is damaged before its last line, or when a new one exists already.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None and path.exists():
            raise ValueError(f"{path} is the record of an earlier run; give a new run another directory")
        if resume_step is not None:
            _cut_back(path, resume_step)
        self._last_step = resume_step
        self._file = path.open("ab")
        self._pending = bytearray()

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Append a line, `step` first; `flush` writes it. Raises: ValueError for a step that does not rise."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self._file.name}: a line of step {step} follows one of step {self._last_step}, and steps must rise; "
                "give one line per step, and after a resume continue with the step after resume_step"
            )
        self._pending += (json.dumps({"step": int(step), **row}, allow_nan=False) + "\n").encode()
        self._last_step = step

    def flush(self) -> None:
        """Write to the disk. Lines that a full disk does not take are kept, and a later call writes them."""
        if not self._pending:
            return
        try:
            while self._pending:
                del self._pending[: os.write(self._file.fileno(), self._pending)]
            os.fsync(self._file.fileno())
        except OSError as error:
            log.warning("%s: %d bytes could not be written yet: %s", self._file.name, len(self._pending), error)

    def close(self) -> None:
        self.flush()
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines, oldest first. A torn last line (a run being written) is left out.

    Raises: ValueError if a line before the last is damaged.
    """
    lines = path.read_bytes().split(b"\n")
    lines.pop()  # nothing, or a torn line
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(
                f"{path}, line {number}: got {line[:80]!r}, expected a JSON object with an integer `step`; only the "
                "last line can be torn by a crash, so something else wrote here: repair or remove the line"
            )
        rows.append(row)
    return rows


def require_readable_lines(path: Path) -> None:
    """Raises: ValueError if an earlier run's file is damaged before its last line."""
    if path.exists():
        read_lines(path)


def _cut_back(path: Path, resume_step: int) -> None:
    """Keep the lines with step <= resume_step, atomically."""
    if not path.exists():
        log.warning("resuming after step %d, but there is no %s: the record starts here", resume_step, path)
        return
    kept = [row for row in read_lines(path) if row["step"] <= resume_step]
    newest = kept[-1]["step"] if kept else -1
    if newest < resume_step and resume_step:  # a record may begin with step 1
        log.warning("%s ends at step %d, and the run goes on after step %d: lines are lost", path, newest, resume_step)
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in kept))
