"""A rehearsal in a process of its own.

It forks ranks from itself, and a process that has trained before, or a notebook's, has threads and locks that a fork
does not survive.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarlhf.rehearsal.request import Request
    from megarlhf.rehearsal.result import Result

_REQUEST, _OUTCOME = "request.pickle", "outcome.pickle"


def in_own_process(request: Request) -> Result:
    """Rehearse a request. Raises: ValueError and RuntimeError as `rehearsal.rehearse.rehearse`."""
    with tempfile.TemporaryDirectory(prefix="megarlhf-") as folder:
        (Path(folder) / _REQUEST).write_bytes(pickle.dumps(request))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        done = subprocess.run(
            [sys.executable, "-m", "megarlhf.api.rehearsed", folder],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},  # missing models and data are replaced
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        file = Path(folder) / _OUTCOME
        if not file.is_file():
            raise RuntimeError(f"the rehearsal's process ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        outcome: Result | Exception = pickle.loads(file.read_bytes())
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def main(folder: Path) -> None:
    """Rehearse the request in a folder, and write the outcome beside it."""
    from megarlhf.architectures.own_families import register_families_of
    from megarlhf.rehearsal.rehearse import rehearse

    request: Request = pickle.loads((folder / _REQUEST).read_bytes())
    outcome: Result | Exception
    try:
        register_families_of(request.cfg.roles())
        outcome = rehearse(request)
    except (ValueError, RuntimeError) as error:
        outcome = error
    (folder / _OUTCOME).write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
