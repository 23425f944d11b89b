"""Size and SHA-256 of files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of a file of a resume point."""

    bytes: int
    sha256: str


def digest_of(path: Path) -> FileDigest:
    """Read a file and return its digest."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size, digest.hexdigest())


def digest_of_directory(directory: Path) -> str:
    """SHA-256 of the names and contents of the files in a directory, without those of folders in it."""
    files = {path.name: digest_of(path).sha256 for path in sorted(directory.iterdir()) if path.is_file()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
