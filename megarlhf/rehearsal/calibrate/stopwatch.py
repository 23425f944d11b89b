"""Clock for measurements on a machine that others use too."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""File of Linux with nanoseconds on a core, nanoseconds ready but not on a core, and the number of time slices."""
READ_SECONDS = 50e-6
TRIES = 10


def undisturbed_clock() -> float:
    """Seconds on a clock that stands still while this thread was ready and another one ran. Where the kernel does not
    report that, it is `perf_counter`.

    Time in which the thread waits (for a lock, for another rank) counts. So do effects of others on caches and clock
    speed.
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
