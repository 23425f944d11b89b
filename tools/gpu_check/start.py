"""Starting ranks: on this machine, or over the nodes of a Slurm job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tools.gpu_check.cases import PROGRAM, Launch

ROOT = Path(__file__).parents[2]
ENDING_SECONDS = 30.0
RANK_ENVIRONMENT: Mapping[str, str] = {
    # cuBLAS reads it: no product in fp32 in the shorter format of its tensor cores, also where TransformerEngine asks.
    "NVIDIA_TF32_OVERRIDE": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class Start(Protocol):
    """Starts the ranks of a launch and waits for them."""

    def __call__(self, launch: Launch, path: Path) -> str:
        """Returns: how they ended, in words; nothing where they ended well."""
        ...


@dataclass
class Processes:
    """Ranks as processes: `srun` empty on this machine, otherwise the words of an srun and what stands behind it."""

    srun: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    started: int = 0

    def __call__(self, launch: Launch, path: Path) -> str:
        environment = {**RANK_ENVIRONMENT, **self._inherited(), **self.environment, **self._port()}
        self.started += 1
        # Behind srun there may be a container, with a Python of its own.
        python = os.environ.get("MEGARLHF_PYTHON", "python3") if self.srun else sys.executable
        command = [*self._before(launch), python, *PROGRAM, str(path)]
        with log_of(path).open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                status = process.wait(launch.seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"did not end in {launch.seconds:.0f} s"
            except BaseException:
                _end(process)
                raise
        return f"ended with exit status {status}" if status else ""

    def _before(self, launch: Launch) -> list[str]:
        """The same number of ranks on each of the first nodes of the job."""
        if not self.srun:
            return []
        per_node, rest = divmod(launch.ranks, launch.nodes)
        assert not rest, f"{launch.ranks} ranks on {launch.nodes} nodes"
        name, *words = self.srun
        counts = [
            f"--nodes={launch.nodes}",
            f"--ntasks={launch.ranks}",
            f"--ntasks-per-node={per_node}",
            "--relative=0",
        ]
        return [name, *counts, *words]

    def _inherited(self) -> dict[str, str]:
        """On one machine without another launcher's variables: a shell of Slurm's would be taken for a rank."""
        own = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_") if not self.srun else ()
        return {name: value for name, value in os.environ.items() if not name.startswith(own)}

    def _port(self) -> dict[str, str]:
        """A launch does not wait for the port of the one before it to be free."""
        return {"MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + self.started)} if self.srun else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """A start of ours ends its ranks at once when it gets SIGHUP, and under nohup at the second SIGTERM; srun hands
    signals on."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(ENDING_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def log_of(path: Path) -> Path:
    """What the ranks of a launch have written."""
    return path.parent / "output.log"


def results_of(path: Path) -> list[dict[str, Any]]:
    """Of the jobs that came to their end, in order."""
    results = path.parent / "results.jsonl"
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
