"""The real commands, started as a user starts them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def outside_a_run() -> dict[str, str]:
    """The environment of a command that no launcher has started."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "MASTER_"))}
    return env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """This interpreter with `arguments`, at the repository's root and outside any launcher's run."""
    command, env = [sys.executable, *arguments], outside_a_run()
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)


def megarlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, which launches `run.nproc` ranks itself."""
    return python("-m", "megarlhf", *arguments)


def argv_of(command: str, tree: Mapping[str, Any], file: Path) -> list[str]:
    """The arguments of a command that reads this configuration, which is written to `file`."""
    file.write_text(yaml.safe_dump(dict(tree)))
    return [command, "-c", str(file)]


def is_running(pid: int | str) -> bool:
    """Whether the process is there and no zombie that waits for its parent's look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def succeed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same, which must not fail."""
    done = megarlhf(*arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
