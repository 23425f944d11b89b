"""`megarlhf replay FAILURE_DIR`: repeat a skipped step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megarlhf.architectures.own_families import register_families_of
from megarlhf.commands import launch
from megarlhf.planning.layout import check_role
from megarlhf.resume.claim.config_changes import TrainingConfig
from megarlhf.runtime import RankInfo, detect_rank
from megarlhf.trainers.run.failures import Failure

ENTRY = "megarlhf.trainers.replay:run"


def replay(directory: Path, overrides: Sequence[str], argv: Sequence[str]) -> int:
    """Repeat the step saved in `directory`, with the run's configuration and `overrides`; returns the exit status.

    The run directory is only read. Raises: ValueError if the directory is no failure, or the ranks do not fit the
    layout.
    """
    failure = Failure.read(directory)
    cfg = failure.config(directory, overrides)
    register_families_of(cfg.roles())
    info = detect_rank(os.environ)
    if info is None:
        _require_ranks(failure, cfg, overrides)
    check_role(failure.role, failure.section(cfg), cfg.run.nproc if info is None else info.world_size)
    if info is None and cfg.run.nproc > 1:
        return launch.local_ranks(cfg.run.nproc, argv)
    return launch.as_rank(info or RankInfo(), cfg, ENTRY, reads=directory)


def _require_ranks(failure: Failure, cfg: TrainingConfig, overrides: Sequence[str]) -> None:
    """Refuse a plain start of a launcher's run, unless an override names the number of ranks. Raises: ValueError."""
    is_given = any(override.startswith(("run.nproc=", "run=")) for override in overrides)
    if cfg.run.nproc != failure.world_size and not is_given:
        raise ValueError(
            f"{failure.title} was made by {failure.world_size} rank(s) of a launcher ({failure.layout}); start replay "
            "by srun or torchrun with as many, or plainly on fewer, such as run.nproc=1 "
            f"{failure.role}.parallel.tp=1 {failure.role}.parallel.pp=1"
        )
