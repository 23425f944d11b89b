"""The watchdog of one rank on a clock that the test turns, and the report. Real ranks: tests/distributed/."""

import dataclasses
import signal
import sys
import time

import pytest

from megarlhf.config import WatchdogConfig
from megarlhf.errors import WatchdogInterrupt, WatchdogTimeout
from megarlhf.observe.watch import watchdog as module
from megarlhf.observe.watch.phases import Phases
from megarlhf.observe.watch.stacks import RankState, describe_states, innermost_line, read_states, waits_for_others
from megarlhf.observe.watch.watchdog import Watchdog
from tests.distributed.faulty_rules import as_in_a_collective
from tests.observe.test_phases import Clock
from tests.refuses import missing_names, refuses


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A started watchdog of rank 0, whose thread looks all the time; its phases, and the statuses it has ended with."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "INTERRUPT_SECONDS", 0.05)
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.1)
    started = []

    def start(clock, hosts=("here",), **cfg):
        phases, ended = Phases(clock), []
        dog = Watchdog(WatchdogConfig(**cfg), phases, tmp_path / "watchdog", 0, hosts, end=ended.append)
        phases.observer = dog
        dog.start()
        started.append(dog)
        return phases, dog, ended

    yield start
    for dog in started:
        dog.close()


def test_a_late_phase_is_interrupted_where_it_stands(make, tmp_path, capfd):
    clock = Clock()
    phases, dog, ended = make(clock, reward=30)

    def hang():
        with phases("reward"):
            clock.now += 29
            time.sleep(0.1)
            assert not dog.late
            clock.now += 2
            time.sleep(60)

    with refuses("'reward'", "30 s", "watchdog.reward", error=WatchdogTimeout) as e:
        hang()
    assert not e.value.agreed, "the other ranks know nothing of it"
    assert isinstance(e.value.__cause__, WatchdogInterrupt)
    dog.close()
    assert ended == []
    (state,) = read_states(tmp_path / "watchdog")
    assert (state.phase, state.seconds, state.limit, state.late, state.waits) == ("reward", 31, 30, True, False)
    assert "time.sleep(60)" in state.place
    assert missing_names(capfd.readouterr().err, "'reward'", "31 s", "rank 0 on here") == []


def test_an_interrupt_that_is_swallowed_ends_the_phase_all_the_same(make):
    clock = Clock()
    phases, _, _ = make(clock, eval=1)

    def swallow():
        with phases("eval"):
            clock.now += 2
            try:
                time.sleep(60)
            except BaseException:  # noqa: BLE001 -- as a user's function may
                clock.now -= 2  # no second interrupt

    with refuses("'eval'", "interrupted", "watchdog", error=WatchdogTimeout):
        swallow()


def test_a_rank_that_does_not_leave_the_phase_ends_itself_with_status_3(make, capfd):
    """It stands in a collective, as far as the stack says, and is not interrupted there."""
    clock = Clock()
    phases, _, ended = make(clock, rollout=5, grace=7)

    def wait():
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.2)
            clock.now += 5

    with phases("rollout"):
        clock.now += 6
        as_in_a_collective(wait)
    assert ended[:1] == [3]
    assert missing_names(capfd.readouterr().err, "rank 0 on here", "7 s", "watchdog.grace", "status 3") == []


def test_what_the_timer_of_processor_time_saw_is_not_overwritten_by_a_later_look(make, tmp_path, monkeypatch):
    """The thread comes when the interrupt has led the rank into the collective where errors are told."""
    monkeypatch.setattr(module, "POLL_SECONDS", 1.0)
    clock = Clock()
    phases, _, _ = make(clock, reward=1)
    report = tmp_path / "watchdog/report.txt"

    def wait():
        deadline = time.monotonic() + 20
        while not report.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def hang():
        with phases("reward"):
            clock.now += 2
            try:
                signal.raise_signal(signal.SIGVTALRM)
            except WatchdogInterrupt:
                as_in_a_collective(wait)

    with pytest.raises(WatchdogTimeout):
        hang()
    (state,) = read_states(tmp_path / "watchdog")
    assert not state.waits
    assert "raise_signal" in state.place
    assert "does not wait for others" in report.read_text()


def test_phases_without_limit_and_a_watchdog_that_is_off_watch_nothing(make):
    clock = Clock()
    phases, dog, _ = make(clock, train=0)
    with phases("train/actor"):
        clock.now += 1e9
        time.sleep(0.1)
    assert not dog.late
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert WatchdogConfig(enabled=False).limit("rollout") == 0


def test_limits_are_by_kind_and_collectives_wait_longer():
    cfg = WatchdogConfig(train=5000, grace=10)
    assert cfg.limit("train/actor") == cfg.limit("train/critic") == 5000
    assert cfg.collective_timeout() > 7200 + 10, "the longest limit, build's"
    assert WatchdogConfig(rollout=0).collective_timeout() > 24 * 3600
    assert WatchdogConfig(enabled=False).collective_timeout() == 1800


def test_a_rank_that_is_not_late_writes_what_it_does_when_another_has(make, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FOLDER_SECONDS", 0.0)
    clock = Clock()
    phases, dog, ended = make(clock, hosts=("here", "there"))
    with phases("train/actor"):
        clock.now += 1
        (tmp_path / "watchdog").mkdir()
        deadline = time.monotonic() + 20
        while not list((tmp_path / "watchdog").glob("rank_00000.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
    dog.close()
    (state,) = read_states(tmp_path / "watchdog")
    assert (state.phase, state.late) == ("train/actor", False)
    assert (dog.late, ended) == (False, [])


STATE = RankState(
    rank=0, host="n0", pid=7, phase="reward", seconds=31, limit=30, late=True, waits=True, place="rl.py:9 in f: x",
    stack=["rl.py:9 in f: x"], threads={},
)  # fmt: skip


def test_the_report_names_first_who_does_not_wait_and_last_who_is_silent(tmp_path):
    at = dataclasses.replace
    states = [at(STATE, rank=n, host=f"n{n}") for n in (0, 1, 4)]
    states.insert(2, at(STATE, rank=3, host="n3", waits=False, seconds=33, place="rules.py:12 in score: solve()"))
    lines = describe_states(states, [f"n{n}" for n in range(6)], tmp_path).splitlines()
    for line, names in {
        0: ("'reward'", "33 s", "rank 3 on n3", "watchdog.reward = 30 s"),
        1: ("rank 3 on n3", "pid 7", "'reward'", "rules.py:12 in score: solve()"),
        3: ("rank 0-1, 4", "collective", "'reward'", "rl.py:9 in f: x"),
    }.items():
        assert missing_names(lines[line], *names) == []
    silent = [line.split(":")[0] for line in lines if "wrote nothing" in line]
    assert silent == ["  rank 2 on n2 wrote nothing", "  rank 5 on n5 wrote nothing"]


def test_where_all_wait_the_odd_one_is_named_first(tmp_path):
    states = [dataclasses.replace(STATE, rank=n) for n in range(3)]
    states.append(dataclasses.replace(STATE, rank=3, host="n3", place="other.py:1 in g: y"))
    lines = describe_states(states, ["n0"] * 4, tmp_path).splitlines()
    assert missing_names(lines[1], "rank 3 on n3", "'reward'", "other.py:1 in g: y") == []
    assert sum("not in the same collective" in line for line in lines) == 1


def test_a_stack_says_whether_it_waits_and_where_in_the_user_s_code():
    frame = sys._getframe()
    assert not waits_for_others(frame)
    assert "test_watchdog.py" in innermost_line(frame)
    waits = []
    as_in_a_collective(lambda: waits.append(waits_for_others(sys._getframe())))
    assert waits == [True]
