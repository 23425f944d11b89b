"""A plain start and its ranks live and die together. Not covered: Ctrl-C in a real terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_stop_signal_reaches_the_ranks(tmp_path: Path) -> None:
    """SIGTERM to the command that launched them, as `timeout` or a CI job sends it."""
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import sys; from megarlhf.commands.launch import call; sys.exit(call([sys.executable, '-c', {child!r}]))"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) != 0
    assert not Path(f"/proc/{pid}").exists(), "the child outlived its parent"


def test_the_exit_status_is_the_child_s() -> None:
    from megarlhf.commands.launch import call

    assert call([sys.executable, "-c", "raise SystemExit(7)"]) == 7
