"""How `make test-gpu` starts its ranks: on this machine and through srun. Not covered: a real srun."""

import os
import subprocess
import sys
import time

import pytest

from megarlhf.runtime import capabilities
from tools.gpu_check import start
from tools.gpu_check.cases import Launch


def test_ranks_that_hang_are_ended_and_named(monkeypatch, tmp_path) -> None:
    script = "import os, signal, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    monkeypatch.setattr(start, "PROGRAM", ("-c", script))
    launch = Launch(check="sft", case="tp1", ranks=1, seconds=1.0)
    began = time.monotonic()
    assert "1 s" in start.Processes()(launch, launch.dump(tmp_path))
    assert time.monotonic() - began < 50
    pid = int((tmp_path / launch.name / "output.log").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_start_through_srun_with_their_places_and_a_port_of_their_own(monkeypatch, tmp_path) -> None:
    """A stand-in for srun writes down its arguments."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\necho "$MASTER_PORT $NVIDIA_TF32_OVERRIDE"\nexit 3\n')
    srun.chmod(0o755)
    monkeypatch.setenv("MASTER_PORT", "20000")
    monkeypatch.delenv("MEGARLHF_PYTHON", raising=False)
    processes = start.Processes([str(srun), "--label", "apptainer", "exec"])
    launch = Launch(check="sft", case="tp2pp2 over 2 nodes", ranks=4, nodes=2)
    path = launch.dump(tmp_path)
    for port in ("20000", "20001"):
        assert "status 3" in processes(launch, path)
        words, environment = start.log_of(path).read_text().splitlines()
        assert words == (
            "--nodes=2 --ntasks=4 --ntasks-per-node=2 --relative=0 --label apptainer exec "
            f"python3 -m tools.gpu_check.rank {path}"
        )
        assert environment == f"{port} 0"


def test_make_says_it_and_ends_with_two() -> None:
    """As a user types it, where there is no GPU."""
    if capabilities().device_count:
        pytest.skip("this machine has a GPU")
    asked = ["make", "--no-print-directory", "test-gpu", f"PY={sys.executable}"]
    done = subprocess.run(asked, cwd=start.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr
