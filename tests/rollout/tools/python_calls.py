"""Calls of the Python tool for tests, and a look for what they leave."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarlhf.rollout.tools.call import ToolError
from megarlhf.rollout.tools.python.guard import FOLDER_PREFIX
from megarlhf.rollout.tools.python.limits import PythonLimits
from megarlhf.rollout.tools.python.tool import run_python

LIMITS = PythonLimits(seconds=5.0)
SECRET = "do not read"


def call(code: str, limits: PythonLimits = LIMITS, without: tuple[str, ...] = ()) -> str:
    """What the model sees."""
    try:
        return asyncio.run(run_python(code, limits, without))
    except ToolError as error:
        return f"ToolError: {error}"


def guards() -> set[int]:
    """Guards of this test and everything forked from one, whatever parent it has. Other tests may run beside it."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"megarlhf.rollout.tools.python.guard" in path.read_bytes() and _stands_in(path.parent):
                pids.add(int(path.parent.name))
        except OSError:
            pass
    return pids - {os.getpid()}


def _stands_in(process: Path) -> bool:
    """Whether a process has its folder, or an open file, in the present folder of temporary files."""
    places = [process / "cwd", *(process / "fd").iterdir()]
    return any(os.readlink(place).startswith(tempfile.gettempdir()) for place in places)


def left_over() -> tuple[object, ...]:
    folders = list(Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"))
    kernel = [Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("shm", "sem", "msg")]
    return guards(), folders, [len(text.splitlines()) for text in kernel]


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run with a secret. No call may leave anything, or change the secret."""
    scratch, run = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    run.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (run / "secret").write_text(SECRET)
    (run / "secret").chmod(0o600)
    before = left_over()
    assert before[0] == set()
    yield run
    assert left_over() == before
    assert (run / "secret").read_text() == SECRET
    assert (run / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in run.iterdir()] == ["secret"]
    assert {path.name for path in tmp_path.iterdir()} == {"scratch", "run"}
