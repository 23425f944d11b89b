"""Configurations of a run, and the lock of a process that has gone."""

import subprocess
import sys

import pytest

from megarlhf.config import SFTConfig
from tests.command import ROOT


@pytest.fixture
def cfg(tmp_path):
    """A configuration of sft with changes to its section `run`, and to the actor's model."""

    def make(model="model", num_steps=10, optim=None, **run):
        return SFTConfig.model_validate(
            {
                "run": {"dir": tmp_path / "run", **run},
                "actor": {"model": {"path": tmp_path / model}, "optim": optim or {}},
                "data": {"train": tmp_path / "train.jsonl"},
                "train": {"num_steps": num_steps, "mini_batch_samples": 1, "micro_batch_samples": 1},
            }
        )

    return make


@pytest.fixture
def dead_lock():
    """A directory with the lock of a process that has ended."""

    def leave(directory):
        directory.mkdir(exist_ok=True)
        taking = f"Lock.take(pathlib.Path({str(directory)!r})); "
        code = "import os, pathlib; from megarlhf.resume.claim.lock import Lock; " + taking
        subprocess.run([sys.executable, "-c", code + "os._exit(9)"], check=False, cwd=ROOT)
        assert (directory / "lock").exists()

    return leave
