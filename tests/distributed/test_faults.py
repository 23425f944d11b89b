"""Faults that a run survives, or ends of in order: what was complete is untouched, the same command goes on exactly.

Each is brought about in ranks that are there already. A real kill of processes, and a small file system that is full:
`make test-faults`. Not covered: GPUs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megarlhf.resume.point import find_points
from tests.distributed.resume_jobs import command_until, command_with
from tests.distributed.test_resume import TRAIN, Case, command_line, rows, tree
from tests.ranks import RankPool


@pytest.fixture
def case(two_layers: dict[str, Path], data: dict[str, Path]):
    """A command by its name, with one section of its configuration replaced by each keyword."""

    def make(name: str, **sections: Any) -> Case:
        command = "rl" if name in ("ppo", "grpo") else name
        return Case(command, tree(name, two_layers, data) | sections, Path())

    return make


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file by its path: what is in it, and when it was written."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("name, module", [("sft", "megarlhf.trainers.supervised"), ("grpo", "megarlhf.trainers.rl")])
def test_a_signal_while_the_models_are_built(name: str, module: str, case, ranks: RankPool, tmp_path: Path) -> None:
    """With nothing saved yet the directory stays empty; an earlier run's stays as it is. One rank of two gets it."""
    made = case(name, checkpoint={"every": 1, "every_minutes": 0})
    made.config["train"]["num_steps"] = 2
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(2, "command", *command_line(made, whole))
    argv = command_line(made, run)
    build = (1, module, "build_role")
    (status, said), (other, _) = ranks.run(2, command_with, signal.SIGTERM, 1, *build, *argv)
    assert (status, other) == (75, 75)
    assert "stopped (SIGTERM) before anything was done; the same command begins" in said
    assert list(run.iterdir()) == []
    calls = 2 if name == "sft" else 6
    assert "killed" in ranks.run(2, command_until, calls, TRAIN, "step", *argv)
    assert [point.position.name for point in find_points(run)] == ["step_000001"]
    before = content(run)
    (status, said), (other, _) = ranks.run(2, command_with, signal.SIGINT, 0, *build, *argv)
    assert (status, other) == (130, 130)
    assert "stopped (SIGINT) before anything was done; the same command goes on with the earlier run" in said
    assert content(run) == before
    assert "from resume/step_000001" in ranks.run(2, "command", *argv)[0]
    assert rows(run) == rows(whole)
