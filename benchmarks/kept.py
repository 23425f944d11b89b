"""What the parts of a long benchmark have found, so that a run that was interrupted goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.machine import commit_of_sources
from benchmarks.packing_children import Message


def commit_at_end(commit: str) -> str:
    """Of what was measured by a run that began at `commit`: files that have changed since are said."""
    return commit if commit_of_sources() == commit else f"{commit}, changed while it ran"


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
        """In place of what an earlier run has found; not where files have changed since the run began."""
        if commit_at_end(self._key["machine"]["commit"]) != self._key["machine"]["commit"]:
            print(f"{name}: not kept, as the sources have changed while it ran", flush=True)
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"{name}.json").write_text(json.dumps({"key": self._key, "found": found}))
