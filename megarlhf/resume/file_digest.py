"""Size and SHA-256 of a file of a resume point."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """Of a file of a resume point."""

    bytes: int
    sha256: str


def digest_of(path: Path) -> FileDigest:
    """Of a file as it lies there."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileDigest(size, digest.hexdigest())
