"""What users' reward functions start in worker processes: it ends with the worker, and is not kept from ending.

Every process that a function starts sleeps for 777 s or is one of its own; it leaves its number in a file. Not covered:
processes of another user, which a worker may not end.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarlhf.own_code.load import load_function
from megarlhf.rollout.rewards.forms import form_of
from megarlhf.rollout.rewards.pool import RewardPool
from tests.rollout.test_reward_pool import batch

MODULE = '''
import asyncio, multiprocessing, os, pathlib, signal, subprocess, sys, time

STARTED = pathlib.Path(__file__).with_name("started")

def started(number):
    (STARTED / str(number)).touch()

def sleeping(**options):
    process = subprocess.Popen(["sleep", "777"], **options)
    started(process.pid)
    return process

def forked():
    if number := os.fork():
        started(number)
        return
    time.sleep(777)

def daemon():
    """Twice forked, in a session of its own, so that init would get it."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    started(os.getpid())
    time.sleep(777)

def family():
    started(os.getpid())
    sleeping()
    sleeping(start_new_session=True, close_fds=False)
    forked()
    daemon()
    while len(list(STARTED.iterdir())) < 5:
        time.sleep(0.01)

def hangs(prompt, response, fields):
    family()
    subprocess.run(["sleep", "777"])

def exits(prompt, response, fields):
    family()
    os._exit(5)

def crashes(prompt, response, fields):
    family()
    os.kill(os.getpid(), signal.SIGKILL)

def returns(prompt, response, fields):
    family()
    return 1.0

def terminates(prompt, response, fields):
    """How what it starts ends by signals, by itself."""
    statuses = {}
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
        program = sleeping()
        program.send_signal(getattr(signal, name))
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(777,))
        child.start()
        time.sleep(0.5)  # a busy machine: a child takes notice of signals from its first moment on, not of earlier ones
        os.kill(child.pid, getattr(signal, name))
        child.join(20)
        statuses[name] = (program.wait(20), child.exitcode)
    return {name: float(-number) for name, numbers in statuses.items() for number in set(numbers)}

def is_told(prompt, response, fields):
    """The signals of a job, to this process, its group and its supervisor."""
    assert os.getpgrp() == os.getpid() != os.getppid(), "it would reach the tests"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        os.killpg(0, number)
        os.kill(os.getppid(), number)
    time.sleep(0.1)
    return 1.0

def falls_through(prompt, response, fields):
    """A child that returns as its parent does, earlier, and another number."""
    if child := os.fork():
        os.waitpid(child, 0)
        return 1.0
    return 666.0

def group(prompt, response, fields):
    assert os.getpgrp() == os.getpid(), "it would reach the tests"
    os.killpg(0, signal.SIGKILL)

asked = []

async def of_the_loop(prompt, response, fields):
    asked.append(asyncio.get_running_loop())
    return float(len(asked) - len(set(asked)))

async def exits_later(prompt, response, fields):
    await asyncio.sleep(0)
    sys.exit(0)

async def cancels(prompt, response, fields):
    if response == "bb":
        raise asyncio.CancelledError
    return {"a": 1.0, "pid": os.getpid()}
'''


@pytest.fixture
def started(tmp_path):
    """The processes that a function has started."""
    folder = tmp_path / "started"
    folder.mkdir()
    yield lambda: [int(path.name) for path in folder.iterdir()]
    for path in folder.iterdir():  # of a test that has failed
        if is_running(int(path.name)):
            os.kill(int(path.name), signal.SIGKILL)


@pytest.fixture
def pool(tmp_path, monkeypatch, started):
    (tmp_path / "starting_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = []

    def make(name, seconds=60.0):
        rule = f"starting_rewards:{name}"
        sys.modules.pop("starting_rewards", None)
        pools.append(RewardPool(rule, form_of(load_function(rule, "reward rule")), workers=1, timeout_seconds=seconds))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def is_running(number):
    """A process that has ended, but that nobody has looked at, does not run."""
    try:
        state = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def one():
    return batch(responses=("a",))


@pytest.mark.parametrize(
    "name, words",
    [
        ("hangs", "took longer than 10 s"),
        ("exits", "ended its process with status 5; a function must return, not exit"),
        ("crashes", "ended its process by signal 9 (SIGKILL)"),
    ],
)
def test_what_a_function_has_started_ends_with_it(pool, started, name, words):
    """Programs, forked children, sessions of their own and daemons. Those that hold the pipe do not hide how the
    worker has ended, until its time is over."""
    start = time.monotonic()
    (found,) = pool(name, 10.0 if name == "hangs" else 60.0).start(one()).wait()
    assert found.error == words
    assert found.late == (name == "hangs")
    assert time.monotonic() - start < 40
    assert len(started()) == 5
    assert not [number for number in started() if is_running(number)]


def test_what_a_function_has_started_goes_on_until_the_pool_is_closed(pool, started):
    made = pool("returns")
    assert made.start(one()).wait()[0].value == 1.0
    assert len([number for number in started() if is_running(number)]) == 5
    made.close()
    assert not [number for number in started() if is_running(number)]


def test_all_ends_with_the_rank(tmp_path, started):
    """A process that has a pool, and is killed, with its group, while a function hangs."""
    (tmp_path / "starting_rewards.py").write_text(MODULE)
    program = """
from megarlhf.rollout.rewards.forms import Form
from megarlhf.rollout.rewards.pool import RewardPool
from tests.rollout.test_reward_pool import batch
pool = RewardPool("starting_rewards:hangs", Form(), workers=1, timeout_seconds=600.0)
pool.start(batch(responses=("a",))).wait()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    rank = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    until = time.monotonic() + 60
    while len(started()) < 5 and time.monotonic() < until and rank.poll() is None:
        time.sleep(0.05)
    os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
    numbers = started()
    assert len(numbers) == 5
    while (left := [number for number in numbers if is_running(number)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


@pytest.fixture
def signals_end_processes():
    """Also where the tests were started with some of them ignored, as by nohup or in the background of a script."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_a_function_starts_can_be_ended(signals_end_processes, pool, started):
    """Programs and forked children end by the signals that the worker takes no notice of."""
    (found,) = pool("terminates").start(one()).wait()
    assert (found.error, found.components) == ("", {"SIGTERM": 15.0, "SIGINT": 2.0, "SIGHUP": 1.0, "SIGUSR1": 10.0})
    assert len(started()) == 4


@pytest.mark.parametrize("name", ["is_told", "falls_through"])
def test_a_worker_goes_on(pool, name):
    """When a job's signals reach it; and a forked child that returns does not answer in its place."""
    made = pool(name)
    rows = batch().part([0, 1, 2])
    assert [result.error or result.value for result in made.start(rows).wait()] == [1.0] * 3
    assert [result.error or result.value for result in made.start(one()).wait()] == [1.0]


def test_a_function_that_kills_its_process_group(pool):
    """That is its own worker, not the supervisor, which says how it ended."""
    assert pool("group").start(one()).wait()[0].error == "ended its process by signal 9 (SIGKILL)"


def test_batches_of_a_worker_share_an_event_loop(pool):
    made = pool("of_the_loop")
    found = [made.start(one()).wait()[0] for _ in range(3)]
    assert [result.error or result.value for result in found] == [0.0, 1.0, 2.0]


def test_sys_exit_and_cancelling_leave_the_worker(pool):
    """A failure of its sample; the others have rewards, of the same process."""
    (found,) = pool("exits_later").start(one()).wait()
    assert found.error.startswith("raised SystemExit: 0; a function must return, not exit; ")
    made = pool("cancels")
    first, failed, last = made.start(batch()).wait()
    assert failed.error.startswith("raised CancelledError; ")
    (again,) = made.start(one()).wait()
    assert first.components == last.components == again.components
    assert first.components["a"] == 1.0
