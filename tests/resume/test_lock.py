"""One holder at a time, whatever kills it and wherever the next one starts.

Other hosts are played by a changed host name. Not covered: a network file system; a clock that is set while a lock is
watched (only the monotonic one is read).
"""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarlhf import lease
from megarlhf.lease import Holder, Lease
from megarlhf.resume.claim import lock as module
from megarlhf.resume.claim.lock import Lock, LockError
from tests.command import ROOT
from tests.refuses import missing_names, refuses


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(lease, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.6)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)


def leave(directory: Path, **changed: object) -> Holder:
    """The lock of a holder that differs from this process in `changed`, as a crash leaves it."""
    holder = dataclasses.replace(Holder.this_process(), **changed)  # type: ignore[arg-type]
    (directory / "lock").write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def content(directory: Path) -> dict[str, tuple[str, int]]:
    return {path.name: (path.read_text(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def held_by(directory: Path) -> Holder | None:
    """The living holder, for which a start is refused."""
    lock = Lock(directory)
    try:
        lock.require_free()
    except LockError:
        return lock.look().chain[-1]
    return None


HOLD = """
import pathlib, sys, time
from megarlhf.resume.claim.lock import Lock
Lock.take(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def start_holder(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_running_holder_is_named_and_a_killed_one_followed_at_once(tmp_path) -> None:
    process = start_holder(tmp_path)
    before = content(tmp_path)
    with refuses("run.dir", f"pid {process.pid}", f"-c {tmp_path}", f"{tmp_path}/lock", error=LockError):
        Lock.take(tmp_path)
    assert (holder := held_by(tmp_path)) is not None
    assert holder.pid == process.pid
    assert {name: text for name, (text, _) in content(tmp_path).items()} == {n: t for n, (t, _) in before.items()}
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has looked: a zombie
    assert held_by(tmp_path) is None
    started = time.monotonic()
    with Lock.take(tmp_path) as lock:
        assert time.monotonic() - started < module.WATCH_SECONDS / 2
        assert not missing_names(lock.note, f"pid {process.pid}", "ended")
    assert list(tmp_path.iterdir()) == []
    process.communicate()


def test_a_later_process_of_the_same_number_is_no_holder(tmp_path) -> None:
    leave(tmp_path, started=1)
    assert held_by(tmp_path) is None
    leave(tmp_path)
    assert held_by(tmp_path) is not None
    # In another container or after a reboot the number says nothing.
    leave(tmp_path, pid_namespace="pid:[1]", pid=1)
    assert held_by(tmp_path) is None


@pytest.mark.parametrize(
    "theirs, restart, held", [("/7", 0, False), ("/7", 2, True), ("/8", 0, None), ("other/7", 0, None)]
)
def test_an_earlier_attempt_of_this_slurm_job_is_over(theirs, restart, held, tmp_path, monkeypatch) -> None:
    """At once, on another host; a later attempt holds on. Of another job (None) nothing is known: it is watched."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    holder = leave(tmp_path, host="elsewhere", job=theirs, restart=restart)
    if held is None:
        assert Lock(tmp_path).look().verdict == "unknown"
    else:
        assert held_by(tmp_path) == (holder if held else None)


def test_a_holder_on_another_host_is_watched(tmp_path) -> None:
    """As long as it refreshes its lock it lives, whatever its clock says; then it is followed."""
    holder = leave(tmp_path, host="elsewhere")
    refreshing = threading.Event()

    def refresh() -> None:
        while not refreshing.wait(0.1):
            os.utime(tmp_path / "lock", (0, time.monotonic()))

    thread = threading.Thread(target=refresh)
    thread.start()
    with refuses("on elsewhere, since", error=LockError):
        Lock.take(tmp_path)
    refreshing.set()
    thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    started = time.monotonic()
    with Lock.take(tmp_path) as lock:
        assert time.monotonic() - started >= module.WATCH_SECONDS
        assert not missing_names(lock.note, str(holder), "taken over", "1 s")


def test_a_holder_refreshes_its_lock(tmp_path) -> None:
    with Lock.take(tmp_path):
        first = (tmp_path / "lock").stat().st_mtime_ns
        deadline = time.monotonic() + 20
        while (tmp_path / "lock").stat().st_mtime_ns == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / "lock").stat().st_mtime_ns > first


RACE = """
import os, pathlib, sys, time
from megarlhf.resume.claim import lock
directory, begin = pathlib.Path(sys.argv[1]), float(sys.argv[2])
time.sleep(max(0, begin - time.time()))
num_resident = 0
while num_resident < 10 and time.time() < begin + 60:
    try:
        held = lock.Lock.take(directory)
    except lock.LockError:
        continue
    inside = directory / "inside"
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails when another is inside too
    time.sleep(0.001)
    held.require_held()
    inside.unlink()
    num_resident += 1
    if num_resident < 10:
        held.release()
print("held", num_resident, flush=True)
os._exit(9)  # as after a crash: the next process follows a holder that has ended
"""


def test_of_many_newcomers_one_holds_the_lock(tmp_path) -> None:
    """Six processes take it and give it back, and at the end die with it: two are never inside at the same time."""
    command = [sys.executable, "-c", RACE, str(tmp_path), str(time.time() + 1)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for process in processes:
        said, beside = process.communicate(timeout=120)
        assert said == "held 10\n", beside
        # On a busy machine a newcomer may find a holder that has no time to show that it lives.
        assert all("watching" in line for line in beside.splitlines()), beside
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def while_following(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Does `action` when a newcomer has found a dead holder and is about to follow it."""
    create = Lease.create

    def first_act(self: Lease, path: Path, holder: Holder) -> bool:
        monkeypatch.setattr(Lease, "create", create)
        action()
        return create(self, path, holder)

    monkeypatch.setattr(Lease, "create", first_act)


def test_two_newcomers_follow_a_dead_holder_and_the_slower_is_refused(tmp_path, monkeypatch) -> None:
    leave(tmp_path, started=1)
    faster: list[Lock] = []
    while_following(monkeypatch, lambda: faster.append(Lock.take(tmp_path)))
    with refuses(f"pid {os.getpid()}", error=LockError):
        Lock.take(tmp_path)
    faster[0].require_held()
    faster[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_newcomer_that_dies_while_it_follows_is_followed(tmp_path) -> None:
    """It has made `lock.T`, and not renamed it."""
    first = leave(tmp_path, started=1)
    second = leave(tmp_path, started=2)
    os.rename(tmp_path / "lock", tmp_path / f"lock.{first.token}")
    leave(tmp_path, started=1, token=first.token)
    assert held_by(tmp_path) is None
    with Lock.take(tmp_path) as lock:
        assert second.since in lock.note
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        lock.require_held()


def test_a_holder_that_lost_its_lock_says_so_and_leaves_the_new_one(tmp_path) -> None:
    lock = Lock.take(tmp_path)
    lock.require_held()
    other = leave(tmp_path, host="elsewhere", pid=5)
    with refuses("pid 5 on elsewhere", f"{tmp_path}/lock", error=LockError):
        lock.require_held()
    lock.release()
    assert json.loads((tmp_path / "lock").read_text())["token"] == other.token


def test_a_lock_that_somebody_removed_is_made_again(tmp_path) -> None:
    lock = Lock.take(tmp_path)
    (tmp_path / "lock").unlink()
    lock.require_held()
    assert held_by(tmp_path) == lock.holder
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_lock_is_refused_and_stays(tmp_path) -> None:
    (tmp_path / "lock").write_text("mine")
    with refuses("megarlhf's locks", f"{tmp_path}/lock", "remove", "run.dir", error=LockError):
        Lock.take(tmp_path)
    assert (tmp_path / "lock").read_text() == "mine"


def test_without_links_the_file_is_made_exclusively(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with Lock.take(tmp_path):
        with refuses(f"pid {os.getpid()}", error=LockError):
            Lock.take(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_was_lost_is_not_made_twice(tmp_path, monkeypatch) -> None:
    """NFS repeats the request, and is told that the file is there."""
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    with Lock.take(tmp_path) as lock:
        assert held_by(tmp_path) == lock.holder


def test_a_lock_is_given_back_where_nothing_can_be_written(tmp_path, monkeypatch) -> None:
    lock = Lock.take(tmp_path)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lease, "_write_new", full)
    lock.release()
    assert list(tmp_path.iterdir()) == []
