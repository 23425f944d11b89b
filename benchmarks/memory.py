"""The most memory that a process of a benchmark has taken since it began to build what it measures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.packing_children import Message
from benchmarks.peers import AnonymousPeak


def mapped_bytes(suffix: str) -> int:
    """Of this process's pages of mapped files whose names end so: weights that are read where the file is mapped are
    memory too, which anonymous memory does not count."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            counts = len(words) > 5 and words[-1].endswith(suffix)
        elif counts and words[0] in ("Rss:", "Anonymous:"):
            total += int(words[1]) * 1024 * (1 if words[0] == "Rss:" else -1)
    return total


class Peak:
    """Begins when it is made: after the imports, before the first weight is read."""

    def __init__(self) -> None:
        self._anonymous = AnonymousPeak()
        self._anonymous.__enter__()

    def so_far(self) -> Message:
        """Bytes: the peak of anonymous memory above where it began, and with it mapped weights, which stay."""
        anonymous, mapped = self._anonymous.peak_bytes, mapped_bytes(".safetensors")
        return {"peak_bytes": anonymous + mapped, "mapped_bytes": mapped, "largest_gap": self._anonymous.largest_gap}

    def close(self) -> None:
        self._anonymous.__exit__(None, None, None)
