"""A directory that appears whole or not at all."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from megarlhf.weights.checkpoint.staging import Staging
from tests.refuses import refuses


def write(directory, text="new", **options):
    with Staging(directory, **options) as staging:
        (staging.path / "deep").mkdir()
        (staging.path / "deep" / "file").write_text(text)
        assert not (directory / "deep").exists() or options
    return (directory / "deep" / "file").read_text()


def test_it_appears_at_the_end(tmp_path):
    assert write(tmp_path / "a" / "out") == "new"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]
    with refuses(str(tmp_path / "a" / "out"), "exists already"):
        Staging(tmp_path / "a" / "out")
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty") == "new"
    (tmp_path / "file").write_text("x")
    for force in (False, True):
        with refuses(str(tmp_path / "file"), "exists already"):
            Staging(tmp_path / "file", force=force)


def fail_inside(directory, force):
    with Staging(directory, force=force) as staging:
        (staging.path / "half").write_text("half")
        raise RuntimeError("half way")


@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, force):
    out = tmp_path / "out"
    if force:
        write(out, "old")
    with pytest.raises(RuntimeError, match="half way"):
        fail_inside(out, force)
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if force else [])
    assert write(out, "new", force=force) == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_room_is_asked_for_first(tmp_path):
    with Staging(tmp_path / "out") as staging:
        staging.reserve(1)
        with refuses("GB", str(tmp_path / "out"), error=OSError) as error:
            staging.reserve(1 << 60)
        assert error.value.errno == errno.ENOSPC
        (staging.path / "x").write_text("x")


KILLED = """
import sys, time
from megarlhf.weights.checkpoint.staging import Staging
with Staging(sys.argv[1], force=True) as staging:
    (staging.path / "half").write_text("half")
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_is_taken_over_and_a_living_one_is_not(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    for force in (False, True):
        with refuses(str(out), "another process"):
            write(out, force=force)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".out.megarlhf-partial" / "half").exists(), "the kill left it"
    assert not out.exists()
    assert write(out) == "new"
    assert not (out / "half").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_between_its_two_renames(tmp_path, moment):
    out = tmp_path / "out"
    write(out, "old")
    os.rename(out, tmp_path / ".out.megarlhf-replaced")
    if moment == "after":
        write_to = tmp_path / "elsewhere"
        write(write_to, "newer")
        os.rename(write_to, out)
    with refuses(str(out), "exists already"):
        write(out)
    assert (out / "deep" / "file").read_text() == ("old" if moment == "before" else "newer")
    assert write(out, "newest", force=True) == "newest"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_link_stands_for_its_target(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert write(tmp_path / "link", "new", force=True) == "new"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "deep" / "file").read_text() == "new"
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    assert write(tmp_path / "dangling") == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "later", "link", "real"]


def test_a_rename_that_fails_brings_the_old_directory_back(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, "old")
    real = os.rename

    def failing(source, target):
        if str(source).endswith("partial"):
            raise OSError(errno.EIO, "broken")
        real(source, target)

    monkeypatch.setattr("megarlhf.weights.checkpoint.staging.os.rename", failing)
    with pytest.raises(OSError, match="broken"):
        write(out, "new", force=True)
    assert (out / "deep" / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
