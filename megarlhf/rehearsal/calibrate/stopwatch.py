"""A clock for measurements on a machine that others use too."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Of Linux: seconds on a core, seconds ready and not on a core, and slices; in nanoseconds."""
READ_SECONDS = 50e-6
TRIES = 10


def undisturbed_clock() -> float:
    """Seconds; stands still while this thread was ready and another ran. Where the kernel does not say that, it is
    `perf_counter`.

    What the thread waits for (a lock, another rank) counts, and so does what others do to caches and clock speed.
    """
    now = perf_counter()
    for _ in range(TRIES):
        try:
            delay = int(SCHEDSTAT.read_text(encoding="ascii").split()[1]) * 1e-9
        except OSError:
            return now
        before, now = now, perf_counter()
        if now - before < READ_SECONDS:  # otherwise it may have been put off between the two readings
            break
    return now - delay
