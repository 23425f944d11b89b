"""What is asked of the suite as a whole: no process is left, and files keep to their share of the time."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.refuses import missing_names
from tests.suite.cpu_seconds import TABLE, over_their_share
from tests.suite.lanes import OTHERS, RANKS, VLLM_RANKS, kind, next_file

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.suite import cpu_seconds, leftovers
leftovers.SECONDS = 1
cpu_seconds.over_their_share = lambda measured, table: [f"{file} is above" for file in measured]
def pytest_configure(config):
    for plugin in (leftovers.Leftovers(config), cpu_seconds.CpuSeconds(config, [])):
        config.pluginmanager.register(plugin)
"""
ORPHAN = """
import subprocess
def test_passes():
    subprocess.run(["sh", "-c", "setsid sleep 71 >/dev/null 2>&1 &"], check=True)
"""
WAITED_FOR = """
import subprocess
def test_passes():
    subprocess.run(["sleep", "0.01"], check=True)
"""


@pytest.mark.parametrize("body, status", [(ORPHAN, 1), (WAITED_FOR, 0)])
def test_a_session_that_leaves_a_process_fails_and_names_it(body, status, tmp_path) -> None:
    """An orphan in a session of its own, whose parent has ended. It does not live on. A file above its share is named,
    and fails no session."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inner.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    closing = done.stdout.splitlines()[-1]
    assert "1 passed" in closing
    assert "test_inner.py is above" in done.stdout.splitlines()
    assert ("1 error" in closing) == bool(status)
    assert (": sleep 71" in done.stdout) == bool(status)
    living = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "71"] not in living


def test_a_file_above_its_share_is_named() -> None:
    """On a machine of half the speed: b takes 121 of the 2 x 2 x 20 + 2 x 20 seconds that are allowed, c, which is in
    no table, 41 of 40."""
    table = {"a": 40.0, "b": 20.0, "d": 10.0}
    measured = {"a": 80.0, "b": 121.0, "c": 41.0, "d": 20.0, "e": 39.0}
    lines = over_their_share(measured, table)
    assert [line.split(":")[0] for line in lines] == ["b", "c"]
    assert not missing_names(lines[0], "b", "121 CPU seconds", "120", "tests/suite/cpu_seconds.py is 20")
    assert over_their_share({**measured, "b": 119.0, "c": 40.0}, table) == []
    assert over_their_share({"b": 121.0}, table) == [], "a part of the suite is compared with nothing"


def test_the_table_names_files() -> None:
    assert [file for file in TABLE if not (ROOT / file).is_file()] == []


VLLM, SFT, MEMORY = "tests/distributed/test_vllm.py", "tests/distributed/test_sft_layouts.py", "tests/test_memory.py"


def test_workers_prefer_files_of_a_kind() -> None:
    assert [kind(file) for file in (VLLM, SFT, MEMORY)] == [VLLM_RANKS, RANKS, OTHERS]
    assert kind("tests/test_ranks.py") == RANKS
    assert kind("tests/test_pipeline.py") == VLLM_RANKS
    assert [next_file(worker, [SFT, VLLM, MEMORY]) for worker in range(4)] == [VLLM, SFT, MEMORY, MEMORY]
    assert [next_file(worker, [VLLM, SFT]) for worker in range(3)] == [VLLM, SFT, SFT]
    assert [next_file(worker, [VLLM, MEMORY]) for worker in range(3)] == [VLLM, MEMORY, MEMORY]
