"""A file's digest from a bounded part of it: all of a small file, evenly spaced blocks of a large one.

It differs for a file that was cut, rewritten, or damaged in many places. A change between two blocks is not seen.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

BLOCK_BYTES, BLOCKS = 64 << 10, 512
"""32 MiB, which SHA-256 reads in 20 to 80 ms."""


def digest_of_blocks(path: Path) -> str:
    """SHA-256 of a file's size and content. Of a file over 32 MiB, 512 blocks of 64 KiB are read, with its first and
    its last bytes among them."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        if size <= BLOCK_BYTES * BLOCKS:
            digest.update(stream.read())
            return digest.hexdigest()
        for block in range(BLOCKS):
            stream.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
            digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()
