"""Placeholder until the branch with the lock is merged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarlhf.collective_errors import on_first_rank
from megarlhf.config import FrozenModel, RunConfig
from megarlhf.observe.run_directory import CONFIG_FILE, claim


@dataclass
class Claim:
    resumes: bool
    notes: list[str] = field(default_factory=list)
    commit: Any = lambda: None

    def require_held(self) -> None: ...


@contextlib.contextmanager
def claimed(cfg: FrozenModel, run: RunConfig, command: str) -> Iterator[Claim]:
    flag = [(run.dir / CONFIG_FILE).exists() and run.on_existing == "resume"]
    dist.broadcast_object_list(flag, src=0)
    if flag[0]:
        if (run.dir / "FINISHED").exists():
            raise ValueError(f"run.dir = {run.dir} holds a finished run")
        yield Claim(True)
    else:
        on_first_rank(lambda: claim(cfg, run, command))
        yield Claim(False)


def finish(run_dir: Path, step: int, reason: str) -> None:
    (run_dir / "FINISHED").write_text(json.dumps({"step": step, "reason": reason}))


def changes_since(before: Mapping[str, Any], cfg: FrozenModel) -> list[str]:
    return []
