"""A plain start and its ranks live and die together, and what went wrong is said once.

Not covered: Ctrl-C in a real terminal (here SIGINT reaches the command alone: its ranks have sessions of their own).
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import ROOT, is_running
from tests.launched import Command
from tests.refuses import missing_names


def test_a_stop_signal_reaches_the_ranks(tmp_path) -> None:
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


def test_a_signal_while_the_start_is_checked_is_handed_on() -> None:
    from megarlhf.commands.launch import _received_signals
    from megarlhf.resume.signals import note_early

    before = signal.getsignal(signal.SIGUSR1)
    try:
        note_early()
        signal.raise_signal(signal.SIGUSR1)
        with _received_signals() as received:
            assert received.forwarded == [signal.SIGUSR1]
        with _received_signals() as received:
            assert received.forwarded == []
    finally:
        signal.signal(signal.SIGUSR1, before)


RANK = """
import json, os, signal, subprocess, sys, time
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
if what in ("sleep", "tree"):
    from megarlhf.commands.process_tree import end_with_parent
    end_with_parent()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    forked = os.fork()
    if not forked:
        time.sleep(60)
        os._exit(0)
    if rank == 1 and what == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    open(os.path.join(folder, f"{os.getpid()} {child.pid} {forked}"), "w").close()
    time.sleep(60)
if what in ("saves", "saves-badly", "hangs"):
    from megarlhf.resume.signals import StopRequest, StopRun, ignore_stop_signals
    with StopRequest(announces=rank == 0) as stop:
        open(os.path.join(folder, str(os.getpid())), "w").close()
        while what == "hangs" or not stop.requested():
            time.sleep(0.01)
    ignore_stop_signals()
    if rank == 1:
        time.sleep(2.5)  # longer than others are given when a rank has failed
    if what == "saves-badly" and rank == 1:
        raise RuntimeError("the disk is full")
    error = StopRun("saved at step 3; the same command goes on", stop.requested())
    reports = os.environ["MEGARLHF_LAUNCHED"]  # as print_error does, which takes seconds to import
    os.makedirs(reports, exist_ok=True)
    open(f"{reports}/{rank}.json", "w").write(json.dumps({"status": error.status, "message": str(error)}))
    raise SystemExit(error.status)
"""
"""A rank that does what its first argument says."""


@pytest.fixture(scope="module", autouse=True)
def _light_server() -> None:
    """A worker of xdist that runs this file has no ranks: its server need not import what they need."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        multiprocessing.set_forkserver_preload(["tests.launched"])


def start(tmp_path: Path, what: str, rank: str = RANK, ignored: tuple[int, ...] = ()) -> Command:
    return Command(rank, [what, str(tmp_path)], tmp_path.with_suffix(".stderr"), ignored)


def test_the_port_of_a_run_is_taken_before_its_ranks_start(tmp_path) -> None:
    """Else another run, or any program, may get it while a rank imports what it needs; ranks of two runs may meet."""
    rank = """if True:
        import os, socket
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10).close()
    """
    process = start(tmp_path, "meets", rank)
    assert (process.stderr(timeout=60), process.returncode) == ("", 0)


@pytest.mark.parametrize(
    "what, status, names",
    [
        ("all", 2, ["megarlhf all: the file is empty"]),
        ("one", 4, ["megarlhf one (rank 1): line 3 is bad"]),
        ("killed", 137, ["megarlhf killed", "rank 1", "SIGKILL", "memory"]),
        ("crash", 1, ["RuntimeError: the cause", "megarlhf crash", "rank 1", "exit status 1"]),
        ("nothing", 0, []),
    ],
)
def test_what_ranks_find_is_said_once_with_its_status(tmp_path, what, status, names, monkeypatch) -> None:
    """A mistake of all ranks has no rank's name; one rank's has, and the other does not run on. Nothing is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started = time.monotonic()
    process = start(tmp_path, what)
    stderr = process.stderr(timeout=60)
    assert process.returncode == status, stderr
    assert not missing_names(stderr, *names), stderr
    assert stderr.count("megarlhf ") == bool(names), stderr
    assert ("Traceback" in stderr) == (what == "crash"), stderr
    assert time.monotonic() - started < 50, "the other rank slept on"
    assert list(tmp_path.glob("megarlhf-ranks-*")) == []


def files(folder: Path, number: int) -> list[Path]:
    """The first `number` files that appear there."""
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < number and time.monotonic() < deadline:
        time.sleep(0.05)
    paths = sorted(folder.iterdir())
    assert len(paths) == number
    return paths


def running(pids: list[str]) -> list[str]:
    """Those that are still there after a while."""
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_stops_the_command_stops_its_ranks_and_theirs_in_one_line(tmp_path, number, monkeypatch) -> None:
    """Ranks that are not ready to save; one does not listen, and each has processes of its own. While there
    is no mistake to report, there is no folder for it either, which a SIGKILL of the command would leave behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(tmp_path, "sleep")
    pids = [pid for path in files(tmp_path, 2) for pid in path.name.split()]
    assert len(pids) == 6
    assert all(map(is_running, pids))
    process.send_signal(number)
    stderr = process.stderr(timeout=30)
    assert process.returncode == 128 + number
    (line,) = stderr.split("\n")[1:-1]
    assert not missing_names(line, "megarlhf sleep", f"stopped ({number.name})", "all ranks")
    assert running(pids) == []


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_the_first_signal_lets_the_ranks_save(tmp_path, number, status) -> None:
    """They end by themselves, one of them late, and what they have saved is reported once. The command gets the signal
    twice, as with Ctrl-C, or from a closed terminal and its shell."""
    process = start(tmp_path, "saves")
    pids = [path.name for path in files(tmp_path, 2)]
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
    stderr = process.stderr(timeout=30)
    assert process.returncode == status, stderr
    first, second = stderr.split("\n")[1:-1]
    assert not missing_names(first, "megarlhf", number.name, "saving")
    assert second == "megarlhf saves: saved at step 3; the same command goes on"
    assert not any(map(is_running, pids))


SAVING_RANK = """
import os, pathlib, sys, time, types
from megarlhf.commands import launch
from megarlhf.config import WatchdogConfig
from megarlhf.resume.signals import StopRequest, StopRun
from megarlhf.runtime import detect_rank

def run(cfg, runtime):
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ  # as what a rank starts would look for a store of theirs
    with StopRequest(device=runtime.device, announces=runtime.is_main) as stop:
        open(os.path.join(sys.argv[1], f"{runtime.rank} {os.getpid()}"), "w").close()
        while (number := stop.agreed()) is None:
            time.sleep(0.01)
        raise StopRun("saved", number)

sys.modules["toy"] = types.SimpleNamespace(run=run)
try:
    here = types.SimpleNamespace(seed=0, deterministic=False, dir=pathlib.Path(sys.argv[1]) / "run")
    cfg = types.SimpleNamespace(run=here, watchdog=WatchdogConfig())
    launch.as_rank(detect_rank(os.environ), cfg, "toy:run")
except StopRun as error:
    launch.print_error("sft", str(error), error.status)
    raise SystemExit(error.status)
"""


def test_ranks_that_save_leave_together_and_without_a_word_of_gloo(tmp_path) -> None:
    """One rank alone has received the signal, as when Slurm takes back one of the nodes."""
    process = start(tmp_path, str(tmp_path), SAVING_RANK)
    pids = dict(path.name.split() for path in files(tmp_path, 2))
    os.kill(int(pids["1"]), signal.SIGUSR1)
    stderr = process.stderr(timeout=60)
    assert (process.returncode, stderr) == (75, f"megarlhf {tmp_path}: saved\n")


def test_a_rank_that_fails_while_others_save_is_the_status(tmp_path) -> None:
    process = start(tmp_path, "saves-badly")
    files(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    stderr = process.stderr(timeout=30)
    assert process.returncode == 1
    assert not missing_names(stderr, "RuntimeError: the disk is full", "megarlhf saves-badly (rank 0): saved at step 3")
    assert not missing_names(stderr.splitlines()[-1], "rank 1", "exit status 1", "All ranks")


@pytest.mark.parametrize("first, second", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM)])
def test_the_second_signal_stops_ranks_that_do_not_come_to_save(tmp_path, first, second) -> None:
    process = start(tmp_path, "hangs")
    pids = [path.name for path in files(tmp_path, 2)]
    process.send_signal(first)
    time.sleep(1.3)
    assert process.returncode is None
    assert all(map(is_running, pids))
    process.send_signal(second)
    stderr = process.stderr(timeout=30)
    assert process.returncode == 128 + second
    assert not missing_names(stderr.splitlines()[-1], "megarlhf hangs", f"stopped ({second.name})", "all ranks")
    assert not any(map(is_running, pids))


def test_hanging_up_does_not_stop_a_command_under_nohup(tmp_path) -> None:
    process = start(tmp_path, "saves", ignored=(signal.SIGHUP,))
    files(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.returncode is None
    process.send_signal(signal.SIGUSR1)
    stderr = process.stderr(timeout=30)
    assert process.returncode == 75
    assert "SIGUSR1" in stderr


@pytest.mark.parametrize("launcher", ["plain", "torchrun"])
def test_ranks_and_theirs_end_with_a_command_that_is_killed(tmp_path, launcher) -> None:
    """Nobody is left to stop them, but Linux and a guard of each rank. torchrun is played by a process that starts a
    rank as it does."""
    process: Command | subprocess.Popen[str]
    if launcher == "plain":
        process = start(tmp_path, "tree")
    else:
        rank = [sys.executable, "-c", RANK, "tree", str(tmp_path)]
        code = f"import subprocess; subprocess.Popen({rank!r}, start_new_session=True).wait()"
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True)
    num_ranks = 2 if launcher == "plain" else 1
    trees = [path.name.split() for path in files(tmp_path, num_ranks)]
    pids = [pid for tree in trees for pid in tree]
    children = {tree[0]: Path(f"/proc/{tree[0]}/task/{tree[0]}/children").read_text().split() for tree in trees}
    guards = [pid for rank, pids in children.items() for pid in pids if pid not in (*trees[0], *trees[-1])]
    assert (len(pids), len(guards)) == (3 * num_ranks, num_ranks)
    deadline = time.monotonic() + 30
    while (names := {Path(f"/proc/{pid}/comm").read_text() for pid in guards}) != {"megarlhf-guard\n"}:
        assert time.monotonic() < deadline, names
        time.sleep(0.01)  # it gives itself its name
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    assert running([*pids, *guards]) == []


def test_what_a_killed_rank_has_started_ends_with_it(tmp_path) -> None:
    process = start(tmp_path, "tree")
    trees = [path.name.split() for path in files(tmp_path, 2)]
    os.kill(int(trees[0][0]), signal.SIGKILL)
    assert running(trees[0]) == []
    stderr = process.stderr(timeout=30)
    assert (process.returncode, stderr.count("SIGKILL")) == (137, 1)
    assert running(trees[1]) == []


def test_a_rank_ends_whose_command_was_killed_before_it_looked() -> None:
    """The process that started it is not its parent any more when it gets so far."""
    code = "from megarlhf.commands.cli import main; main(['doctor']); print('went on')"
    environment = {**os.environ, "MEGARLHF_PARENT": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, ""), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_under_another_launcher_rank_0_speaks_at_once_and_others_wait(rank, monkeypatch, capsys) -> None:
    """torchrun ends the others when rank 0 has failed; what rank 1 alone has found is said after a while."""
    from megarlhf.commands import launch

    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.delenv(launch.MARK, raising=False)
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(launch.JOB_STATE, raising=False)
    launch.print_error("sft", "no", 2)
    assert waited == [launch.SILENCE_SECONDS * rank]
    assert capsys.readouterr().err == ("megarlhf sft: no\n", "megarlhf sft (rank 1): no\n")[rank]


def test_in_a_batch_job_the_script_is_told_and_what_rank_0_has_said_is_not_said_again(
    tmp_path, monkeypatch, capsys
) -> None:
    """srun lets the other ranks be for a minute. What rank 1 alone has found it says."""
    from megarlhf.commands import launch

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.delenv(launch.MARK, raising=False)
    for name, value in {"WORLD_SIZE": "2", launch.JOB_STATE: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for rank, message in (("0", "no"), ("1", "no"), ("1", "neither")):
        monkeypatch.setenv("RANK", rank)
        launch.print_error("sft", message, 2)
    assert capsys.readouterr().err == "megarlhf sft: no\nmegarlhf sft (rank 1): neither\n"
    assert (tmp_path / "exit.0").read_text() == "2\nno\n"
    assert (tmp_path / "exit.1").read_text() == "2\nneither\n"
