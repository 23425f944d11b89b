"""The checks of a run before any of its ranks starts, with what is said of its number of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarlhf.config import RunConfig
from megarlhf.config.load import repeated_overrides
from megarlhf.errors import raised_here
from megarlhf.planning.preflight import Preflight, preflight
from megarlhf.runtime import WITHOUT_STEP, is_shell_of_step


def checked_run(
    command: str,
    cfg: Any,
    ranks: int,
    *,
    starts: int,
    launched: bool,
    local_ranks: int = 0,
    all_records: bool = False,
    overrides: Sequence[str] = (),
) -> Preflight:
    """Check a run on `ranks` ranks; its description has notes on overrides and on the number of ranks.

    starts:      number of ranks that this start has
    launched:    whether torchrun or srun has started them
    local_ranks: number of ranks that start on this machine; 0: none does
    all_records: check all records of small sets, beyond the first ones

    Raises: ValueError that names the mistake and the remedy.
    """
    notes = rank_notes(cfg.run, ranks, starts, launched=launched)
    with rank_notes_in_errors(cfg.run, ranks, notes):
        described = preflight(command, cfg, ranks, local_ranks=local_ranks, all_records=all_records)
    return replace(described, notes=(*described.notes, *repeated_overrides(overrides), *notes))


def refuse_shell_of_step(run: RunConfig, command: str, env: Mapping[str, str]) -> None:
    """Raises: ValueError where several ranks are wanted in a shell that takes itself for the only rank of a step."""
    if max(run.nproc, run.world_size or 1) > 1 and is_shell_of_step(env):
        asked = f"run.nproc = {run.nproc}" if run.nproc > 1 else f"run.world_size = {run.world_size}"
        raise ValueError(
            f"{asked}, and this shell is the one task of a Slurm step (srun --pty, salloc), which by Slurm's variables "
            f"is rank 0 of 1. Start the ranks of this node by `{WITHOUT_STEP} megarlhf {command} ...` or torchrun, and "
            "those of several nodes by srun with a task for each rank; or give run.nproc=1 run.world_size= for one rank"
        )


@contextlib.contextmanager
def rank_notes_in_errors(run: RunConfig, checked: int, notes: Sequence[str]) -> Iterator[None]:
    """Scope in which an error also says that the file is for another number of ranks, which it may fit."""
    try:
        yield
    except ValueError as error:
        if run.world_size in (None, checked) or not raised_here(error):
            raise
        raise ValueError("; ".join([str(error), *notes])) from error


def rank_notes(run: RunConfig, checked: int, starts: int, *, launched: bool) -> list[str]:
    """A sentence if the checked, started and configured numbers of ranks differ."""
    if checked != starts:
        note = f"checked for the {checked} ranks of run.world_size; a plain start has run.nproc = {starts} of them"
        return [f"{note}, which --dry-run run.world_size= (nothing behind it) checks"]
    if run.world_size is None:
        is_unused = launched and starts != run.nproc
        note = f"the launcher started {starts} rank(s); run.nproc = {run.nproc} is not used"
        in_step = "SLURM_STEP_ID" in os.environ and starts == 1
        return [note + f" (`{WITHOUT_STEP} megarlhf ...` starts them)" * in_step] if is_unused else []
    if run.world_size == starts:
        return []
    return [f"this file is for {run.world_size} ranks (run.world_size); this start has {starts}"]
