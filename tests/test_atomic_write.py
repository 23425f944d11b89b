"""A file is the old one or the new one, whatever ends its writer.

Not covered: a crash of the machine; that `sync` comes before the rename is all that is proven of it.
"""

import errno
import os
import signal
import subprocess
import sys

import pytest

from megarlhf.atomic_write import atomic_path, atomic_write, partial_name
from tests.command import ROOT


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file.json").write_text("old")
    return tmp_path / "file.json"


def names(path):
    return sorted(each.name for each in path.parent.iterdir())


@pytest.mark.parametrize(
    "name, writer, expected",
    [
        ("metrics.jsonl", "", ".metrics.jsonl.partial"),
        ("samples/step_[0-9]*.jsonl", "", "samples/.step_[0-9]*.jsonl.partial"),
        ("a.json", 7, ".a.json.7.partial"),
    ],
)
def test_names_of_partial_files(name, writer, expected):
    assert partial_name(name, writer) == expected


def test_a_killed_writer_leaves_the_old_file_and_a_name_that_the_next_writer_replaces(path):
    code = (
        "import os, pathlib, sys; from megarlhf.atomic_write import atomic_path\n"
        "with atomic_path(pathlib.Path(sys.argv[1])) as partial:\n"
        "    partial.write_text('half'); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (path.read_text(), names(path)) == ("old", [partial_name("file.json"), "file.json"])
    atomic_write(path, b"new")
    assert (path.read_text(), names(path)) == ("new", ["file.json"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_beside(path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert (path.read_text(), names(path)) == ("old", ["file.json"])


@pytest.mark.parametrize("synced", [True, False])
def test_the_content_is_synced_before_the_rename(path, monkeypatch, synced):
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, call=call: (calls.append(name), call(*arguments)))
    atomic_write(path, "new", synced=synced)
    assert calls == ["fsync", "replace"][not synced :]
    assert path.read_text() == "new"


def test_a_block_that_leaves_nothing_changes_nothing_and_links_are_replaced(path):
    with atomic_path(path) as partial:
        partial.write_text("half")
        partial.unlink()
    assert (path.read_text(), names(path)) == ("old", ["file.json"])
    for target in ("file.json", "gone"):
        with atomic_path(path.with_name("link"), synced=False) as partial:
            partial.symlink_to(target)
        assert os.readlink(path.with_name("link")) == target
