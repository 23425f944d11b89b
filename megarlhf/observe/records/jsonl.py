"""A file with a JSON object a line, each of a step: appended to while a run goes on, cut back when it is resumed."""

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

    path:        of the file; its directory is made if missing
    resume_step: the last step that the resumed checkpoint contains. Lines of later steps are cut, and so is a last line
                 torn by a crash. None starts a new record, where there is none yet.

    Raises: ValueError when the file is damaged before its last line, or a new record is asked for where one is.
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
                f"{self._file.name}: a line of step {step} after those of step {self._last_step}; steps must rise: "
                "give one line a step, and after a resume continue with the step that follows resume_step"
            )
        self._pending += (json.dumps({"step": int(step), **row}, allow_nan=False) + "\n").encode()
        self._last_step = step

    def flush(self) -> None:
        """Write, to the disk. Lines that a full disk does not take are kept, and written by a later call."""
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
    """Oldest first; a torn last line (a run being written) is left out.

    Raises: ValueError if a line before the last is damaged.
    """
    lines = path.read_bytes().split(b"\n")
    lines.pop()  # what follows the last newline: nothing, or the torn line
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _damaged(path, number, line) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise _damaged(path, number, line)
        rows.append(row)
    return rows


def require_readable(path: Path) -> None:
    """Raises: ValueError where an earlier run's lines are damaged before the last one."""
    if path.exists():
        read_lines(path)


def _damaged(path: Path, number: int, line: bytes) -> ValueError:
    return ValueError(
        f"{path}, line {number}: got {line[:80]!r}, expected a JSON object with an integer `step`; only the "
        "last line can be torn by a crash, so something else wrote here: repair or remove the line"
    )


def _cut_back(path: Path, resume_step: int) -> None:
    """Keep the lines with step <= resume_step, atomically."""
    if not path.exists():
        log.warning("resuming after step %d, but there is no %s: the record starts here", resume_step, path)
        return
    kept = [row for row in read_lines(path) if row["step"] <= resume_step]
    newest = kept[-1]["step"] if kept else -1
    if newest < resume_step:
        log.warning("%s ends at step %d, and the run goes on after step %d: lines are lost", path, newest, resume_step)
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in kept))
