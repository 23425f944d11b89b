"""The pool of rank processes that tests share: which failures end it, and that it leaves nothing behind."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from tests import ranks as module
from tests.command import is_running
from tests.ranks import RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def _pid(runtime):
    return os.getpid()


def _sum(runtime):
    total = torch.tensor(runtime.rank)
    dist.all_reduce(total)
    return int(total)


def _one_raises(runtime):
    """Rank 0 is in a collective that rank 1 does not come to."""
    if runtime.rank == 1:
        raise ValueError("planted")
    _sum(runtime)


def _one_dies(runtime):
    if runtime.rank == 1:
        os._exit(3)
    _sum(runtime)


def _one_hangs(runtime):
    time.sleep(60 * runtime.rank)


def _with_a_child(runtime):
    return os.getpid(), subprocess.Popen(["sleep", "67"]).pid


def _threads(runtime):
    """By name, which those of process groups have a moment after they begin."""
    deadline = time.monotonic() + 10
    while True:
        names = sorted(path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
        if names.count("python\n") == 1 or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


def test_ranks_outlive_a_failure_that_all_of_them_have_told(pool: RankPool):
    """What is said is the first failure; the other rank's, that its collective was broken, follows from it."""
    pids = pool.run(2, _pid)
    with pytest.raises(AssertionError, match=r"(?s)_one_raises failed on rank 1 of 2:.*ValueError: planted"):
        pool.run(2, _one_raises)
    assert pool.run(2, _sum) == [1, 1]
    assert pool.run(2, _pid) == pids


def test_a_rank_that_dies_ends_the_others(pool: RankPool):
    pids = pool.run(2, _pid)
    with pytest.raises(AssertionError, match=r"_one_dies: rank 1 of 2 died|_one_dies failed on rank 0"):
        pool.run(2, _one_dies)
    assert not set(pids) & set(pool.run(2, _pid))


def test_a_rank_that_hangs_is_named_and_ended(pool: RankPool, monkeypatch: pytest.MonkeyPatch):
    pids = pool.run(2, _pid)
    monkeypatch.setattr(module, "JOB_SECONDS", 1)
    with pytest.raises(TimeoutError, match=r"_one_hangs: ranks \[1\] did not answer in 1 s"):
        pool.run(2, _one_hangs)
    assert not any(is_running(pid) for pid in pids)


def test_children_of_ranks_end_with_them(pool: RankPool):
    pids = [pid for pair in pool.run(2, _with_a_child) for pid in pair]
    assert all(is_running(pid) for pid in pids)
    pool.close()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def test_a_job_s_models_and_process_groups_end_with_it(
    pool: RankPool, two_layers: dict[str, Path], data: dict[str, Path], tmp_path: Path
):
    """The threads of a process group wake a hundred times a second: over a session they slow all that comes after."""
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "actor": {"model": {"path": str(two_layers["plain"])}},
        "data": {"train": str(data["sft"]), "max_prompt_tokens": 64, "max_response_tokens": 64},
        "train": {"num_steps": 1, "mini_batch_samples": 4, "micro_batch_samples": 2},
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(tree))
    threads = pool.run(2, _threads)
    pool.run(2, "command", "sft", "-c", str(path))
    assert (tmp_path / "run" / "FINISHED").is_file()
    assert pool.run(2, _threads) == threads
