"""A signal asks a run to save; the second one stops it at once, also where the main thread does not come back.

Each process that gets a signal is a small one. Not covered: what a run saves; NCCL.
"""

import os
import pty
import signal
import subprocess
import sys
import time
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, Signals
from typing import Any

import pytest

from megarlhf.resume import signals
from megarlhf.resume.signals import Repeats, StopRequest, StopRun, held_back, seconds_of, time_left
from megarlhf.runtime import Runtime
from tests.command import ROOT

TOY = """
import ctypes, os, signal, sys, time
from megarlhf.resume import signals
what = sys.argv[1]
signals.REPEAT_SECONDS = 0.3 if what in ("waits", "stuck") else 30.0
signals.END_SECONDS = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
with signals.StopRequest(announces=what != "silent") as stop:
    print("ready", flush=True)
    if what == "stuck":
        mutex = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(mutex), ctypes.CDLL(None).pthread_mutex_lock(mutex)  # for ever
    deadline = time.monotonic() + 60
    while not stop.requested() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(stop.requested().name, flush=True)
    if what == "waits":
        time.sleep(60)
    sys.stdin.readline()
print("left", flush=True)
"""


def hear_hang_up() -> None:
    """Which nohup ignores."""
    signal.signal(SIGHUP, signal.SIG_DFL)


def start(what: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
    process = subprocess.Popen([sys.executable, "-c", TOY, what], cwd=ROOT, **pipes, preexec_fn=hear_hang_up)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR1, SIGHUP, SIGINT])
@pytest.mark.parametrize("what", ["speaks", "silent"])
def test_the_first_signal_is_noted_and_said_once(what, number) -> None:
    """And its echo within the second is no second one."""
    process = start(what)
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, f"{number.name}\nleft\n"), err
    lines = err.split()
    assert lines[:2] == (["megarlhf:", f"{number.name}:"] if what == "speaks" else [])
    assert err.count(number.name) == (what == "speaks")


IN_A_TERMINAL = """
import sys, time
from megarlhf.resume.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while not stop.requested() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    for number in range(100):
        print("a line", number, file=(sys.stdout, sys.stderr)[number % 2], flush=True)
open(sys.argv[1], "w").write(stop.requested().name)
"""


def test_a_terminal_that_is_closed_asks_to_save_and_what_is_written_goes_nowhere(tmp_path) -> None:
    """The kernel sends SIGHUP itself; on the terminal that is gone each further line would be an OSError."""
    child, terminal = pty.fork()
    if not child:
        hear_hang_up()
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "end")])
    said = b""
    while not said.endswith(b"ready\r\n"):  # the kernel may show the word before its line break
        said += os.read(terminal, 100)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "end").read_text() == "SIGHUP"


@pytest.mark.parametrize("what", ["waits", "stuck"])
@pytest.mark.parametrize(
    "first, second, status", [(SIGTERM, SIGTERM, 143), (SIGINT, SIGINT, 130), (SIGINT, SIGTERM, 143)]
)
def test_the_second_signal_ends_the_process(what, first, second, status) -> None:
    """In Python's sleep, which KeyboardInterrupt ends, and in a call of C that no signal ends."""
    process = start(what)
    process.send_signal(first)
    time.sleep(0.5)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(second)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 20
    interrupted = (first, second, what) == (SIGINT, SIGINT, "waits")  # an uncaught KeyboardInterrupt, as everywhere
    assert process.returncode == (-SIGINT if interrupted else status), err
    assert ("KeyboardInterrupt" in err) == interrupted
    assert ("SIGTERM again" in err) == (second == SIGTERM)
    assert "left" not in out


def test_sigterm_after_sigusr1_is_the_first() -> None:
    """Slurm's warning, and then the end of the time: the run may still be saving."""
    repeats = Repeats()
    kinds = [repeats.kind(*each) for each in ((SIGUSR1, 0.0), (SIGUSR1, 5.0), (SIGTERM, 9.0), (SIGTERM, 9.5))]
    assert kinds == ["first", "first", "first", "echo"]
    kinds = [repeats.kind(*each) for each in ((SIGINT, 10.5), (SIGTERM, 11.0), (SIGTERM, 12.0))]
    assert kinds == ["second", "echo", "second"]


def test_signals_in_this_process_and_handlers_afterwards(capfd) -> None:
    """The more urgent counts; a forked child's own signals do not, and end it as ever."""
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    with StopRequest(announces=False) as stop:
        assert stop.requested() is None
        assert stop.agreed() is None
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
        os.kill(child, SIGTERM)
        assert os.waitpid(child, 0)[1] == SIGTERM
        assert stop.requested() is None
        for number in (SIGUSR1, SIGTERM, SIGUSR1):
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 10
            while stop.requested() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
        assert stop.requested() == stop.agreed() == SIGTERM
    assert {number: signal.getsignal(number) for number in signals.STOP_SIGNALS} == before
    assert capfd.readouterr().err == ""


def _agree(runtime: Runtime) -> list[str | None]:
    """What each rank is told when none, and when the second has received a signal."""
    with StopRequest(device=runtime.device, announces=False) as stop:
        answers = [stop.agreed()]
        if runtime.rank == 1:
            os.kill(os.getpid(), SIGTERM)
            while stop.requested() is None:
                time.sleep(0.01)
        answers.append(stop.agreed())
        assert (stop.requested() is None) == (runtime.rank == 0)
    return [None if answer is None else answer.name for answer in answers]


def test_all_ranks_get_the_same_answer(ranks) -> None:
    assert ranks.run(2, _agree) == [[None, "SIGTERM"]] * 2


def test_the_status_of_a_run_that_has_saved() -> None:
    assert [StopRun("saved", number).status for number in (None, SIGUSR1, SIGHUP, SIGTERM, SIGINT)] == [75] * 4 + [130]
    assert str(StopRun("saved in x", SIGTERM)) == "saved in x"


def test_how_slurm_writes_a_time() -> None:
    times = {"1-02:03:04": 93784.0, "2:00:00": 7200.0, "4:05": 245.0}
    assert {text: seconds_of(text) for text in times} == times
    assert [seconds_of(text) for text in ("UNLIMITED", "NOT_SET", "", "x-1:00")] == [None] * 4


def test_the_time_left_is_asked_for_once(tmp_path, monkeypatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    assert time_left() is None
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\necho 1:00\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first, second = time_left(), time_left()
    assert 50 < second <= first <= 60
    assert (tmp_path / "asked").read_text() == "-h -j 77 -o %L\n"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    assert 490 < time_left() <= 500
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert time_left() is None
    monkeypatch.setenv("SLURM_JOB_ID", "79")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert time_left() is None


def test_a_signal_to_a_process_that_is_starting_is_kept() -> None:
    """A plain start hands signals on at once, also to ranks whose Python has not begun to read its modules."""
    code = "import time; time.sleep(0.5); from megarlhf.resume.signals import *; from megarlhf.resume import signals; "
    code += "signals.note_early(); print([number.name for number in signals.early()])"
    with held_back():
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    process.send_signal(Signals.SIGUSR1)
    assert process.communicate(timeout=60)[0].strip() == "['SIGUSR1']"
    assert process.returncode == 0
    assert Signals.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
