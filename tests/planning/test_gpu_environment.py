"""What a run on GPUs asks of CUDA and of torch's allocators. Not covered: a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarlhf.config import RoleConfig
from megarlhf.planning.machine.gpu_environment import ROUNDED, gpu_environment

EXACT = {"PYTORCH_ALLOC_CONF": f"{ROUNDED}:1"}


def roles(tp: int) -> dict[str, RoleConfig]:
    return {"actor": RoleConfig.model_validate({"model": {"path": "models/base"}, "parallel": {"tp": tp}})}


@pytest.mark.parametrize("tp, environ, expected", [
    (2, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **EXACT}), (1, {}, EXACT),
    (2, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, EXACT),
    (1, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
     {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{ROUNDED}:1"}),
    (1, {"PYTORCH_ALLOC_CONF": f"{ROUNDED}:64"}, {}),
])  # fmt: skip
def test_what_the_user_has_not_set(tp: int, environ: dict[str, str], expected: dict[str, str]) -> None:
    assert gpu_environment(roles(tp), environ, on_gpu=True) == expected
    assert gpu_environment(roles(tp), environ, on_gpu=False) == {}


def test_an_older_torch_is_not_given_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 on a GPU: "Unrecognized key 'pinned_max_round_threshold_mb' in CUDA allocator config"."""
    monkeypatch.setattr("megarlhf.planning.machine.gpu_environment.version", lambda package: "2.11.0+cu130")
    assert gpu_environment(roles(1), {}, on_gpu=True) == {}


def test_torch_knows_the_setting() -> None:
    """It passes over keys that it does not know; of one that it knows the value has to be a number."""
    ask = "import sys, torch; torch._C._accelerator_setAllocatorSettings(sys.argv[1])"
    for settings, status in ((f"{ROUNDED}:1", 0), (f"{ROUNDED}:x", 1), ("pinned_no_such_key:x", 0)):
        command = [sys.executable, "-c", ask, settings]
        assert subprocess.run(command, capture_output=True, check=False).returncode == status, settings
