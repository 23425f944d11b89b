"""The checks of a run before any of its ranks starts, with what is said of its number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megarlhf.config import RunConfig
from megarlhf.config.load import repeated_overrides
from megarlhf.errors import raised_here
from megarlhf.planning.preflight import Preflight, preflight


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
        return [f"the launcher started {starts} rank(s); run.nproc = {run.nproc} is not used"] if is_unused else []
    if run.world_size == starts:
        return []
    return [f"this file is for {run.world_size} ranks (run.world_size); this start has {starts}"]
