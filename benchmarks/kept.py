"""What the parts of a long benchmark have found, so that a run that was interrupted goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.packing_children import Message


class Kept:
    """In a directory of build/: for a run of the same commit and settings, which are the key."""

    def __init__(self, directory: Path, key: Message) -> None:
        """`key["machine"]["commit"]`: of the files that are run."""
        self._directory = directory
        self._key = json.loads(json.dumps(key))

    def found(self, name: str) -> Message | None:
        """None where there is nothing, or only of another commit or other settings. Of changed files never."""
        path = self._directory / f"{name}.json"
        if not path.is_file() or self._key["machine"]["commit"].endswith(("-dirty", "unknown")):
            return None
        kept = json.loads(path.read_text())
        if kept["key"] != self._key:
            return None
        print(f"{name}: found by an earlier run of this commit", flush=True)
        return dict(kept["found"])

    def keep(self, name: str, found: Message) -> None:
        """In place of what an earlier run has found."""
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"{name}.json").write_text(json.dumps({"key": self._key, "found": found}))
