"""What a figure has to name: commit, machine, versions, command. Imports nothing but torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
OVER = (
    "A_over_B is the seconds (or bytes, where the name says so) of A over those of B: naive_over_ours, trl_over_ours, "
    "allgather_over_ours above 1: OURS takes less. trl.json has them the other way round."
)
"""How a result file says it, in `direction`."""


def commit_of_sources() -> str:
    """As `git describe` says it, with -dirty where files differ; `unknown` where there is no git to ask."""
    if shutil.which("git") is None:
        return "unknown"
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def machine(command: str, device: torch.device | None = None, commit: str | None = None) -> dict[str, Any]:
    """What a figure has to name; `commit` where there is no git to ask."""
    about: dict[str, Any] = {
        "commit": commit or commit_of_sources(),
        "command": command,
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "device": "cpu",
    }
    if device is not None and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return about
