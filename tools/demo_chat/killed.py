"""A run that is killed in its middle, and goes on: whether it ends as one that nothing happened to."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

POLL_SECONDS = 0.02


def call_and_kill(command: Sequence[str], sign: Path, seconds: float = 1800.0, log: Path | None = None) -> int:
    """Starts the command, and kills it and all that it has started by SIGKILL as soon as `sign` is there.

    Returns: its exit status, that of the signal.
    Raises: RuntimeError where the command ended before, or nothing was seen for so many seconds.
    """
    with open(log or os.devnull, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    ended = None
    try:
        deadline = time.monotonic() + seconds
        while not sign.exists() and ended is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            ended = process.poll()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not sign.exists() or ended is not None:
        said = f"; it said:\n{log.read_text()[-5000:]}" if log else ""
        raise RuntimeError(f"it was to be killed when {sign} was there, but ended with status {ended} before{said}")
    return process.returncode
