"""A plain start and its ranks live and die together, and what went wrong is said once.

Not covered: Ctrl-C in a real terminal (here SIGINT reaches the command alone: its ranks have sessions of their own).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import ROOT, is_running


def test_a_stop_signal_reaches_the_ranks(tmp_path: Path) -> None:
    """SIGTERM to the command that launched them, as `timeout` or a CI job sends it."""
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import sys; from tools.demo.pipeline import call; sys.exit(call([sys.executable, '-c', {child!r}]))"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) != 0
    assert not Path(f"/proc/{pid}").exists(), "the child outlived its parent"


def test_the_exit_status_is_the_child_s() -> None:
    from tools.demo.pipeline import call

    assert call([sys.executable, "-c", "raise SystemExit(7)"]) == 7


RANK = """
import os, signal, subprocess, sys, time
rank, what, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]

def say(message, status=2):
    from megarlhf.commands.launch import print_error
    print_error("sft", message, status)
    raise SystemExit(status)

if what == "all":
    say("the file is empty")
if what == "one":
    say("line 3 is bad", 4) if rank == 1 else time.sleep(60)
if what == "crash":
    raise RuntimeError("the cause") if rank == 1 else time.sleep(60)
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)
if what == "sleep":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(os.path.join(folder, f"{os.getpid()} {child.pid}"), "w").close()
    time.sleep(60)
"""
"""A rank that does what its first argument says."""

PARENT = """
import sys
from megarlhf.commands import launch
launch.STOP_SECONDS = 1.0
sys.exit(launch.local_ranks(2, sys.argv[2:], ["-c", sys.argv[1]]))
"""


def start(tmp_path: Path, what: str) -> subprocess.Popen[str]:
    names = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "MEGARLHF_LAUNCHED")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-c", PARENT, RANK, what, str(tmp_path)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "what, status, message",
    [
        ("all", 2, "megarlhf all: the file is empty\n"),
        ("one", 4, "megarlhf one (rank 1): line 3 is bad\n"),
        ("killed", 137, "megarlhf killed: rank 1 was killed by SIGKILL, as the system does when memory runs out. All"),
        (
            "crash",
            1,
            "RuntimeError: the cause\nmegarlhf crash: rank 1 ended with exit status 1; its error stands above",
        ),
        ("nothing", 0, ""),
    ],
)
def test_what_ranks_find_is_said_once_with_its_status(
    tmp_path: Path, what: str, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of all ranks has no rank's name; one rank's has, and the other does not run on. Nothing is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started = time.monotonic()
    process = start(tmp_path, what)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status, stderr
    assert message in stderr
    assert stderr.count("megarlhf ") == bool(message), stderr
    assert ("Traceback" in stderr) == (what == "crash"), stderr
    assert time.monotonic() - started < 50, "the other rank slept on"
    assert list(tmp_path.glob("megarlhf-ranks-*")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_stops_the_command_stops_its_ranks_and_theirs_in_one_line(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank does not listen to SIGTERM, and each has a process of its own. While there is no mistake to report,
    there is no folder for it either, which a SIGKILL of the command would leave behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(tmp_path, "sleep")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [pid for path in tmp_path.iterdir() for pid in path.name.split()]
    assert len(pids) == 4
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert stderr == f"\nmegarlhf sleep: stopped ({number.name}); all ranks have ended\n"
    left = [pid for pid in pids if is_running(pid)]
    assert left == []


def test_ranks_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """Nobody is left to stop them, but Linux does: `end_with_parent`."""
    rank = "from megarlhf.commands.launch import end_with_parent as e; import os, time; e(); "
    rank += f"open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w').close(); time.sleep(60)"
    code = "import os, subprocess, sys; os.environ['MEGARLHF_PARENT'] = str(os.getpid()); "
    code += f"subprocess.Popen([sys.executable, '-c', {rank!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (pid,) = (path.name for path in tmp_path.iterdir())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_a_rank_ends_whose_command_was_killed_before_it_looked() -> None:
    """The process that started it is not its parent any more when it gets so far."""
    code = "from megarlhf.commands.cli import main; main(['doctor']); print('went on')"
    environment = {**os.environ, "MEGARLHF_PARENT": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, ""), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_under_another_launcher_rank_0_speaks_at_once_and_others_wait(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends the others when rank 0 has failed; what rank 1 alone has found is said after a while."""
    from megarlhf.commands import launch

    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.delenv(launch.MARK, raising=False)
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    launch.print_error("sft", "no", 2)
    assert waited == [launch.SILENCE_SECONDS * rank]
    assert capsys.readouterr().err == ("megarlhf sft: no\n", "megarlhf sft (rank 1): no\n")[rank]
