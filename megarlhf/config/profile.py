"""Configuration of recordings of single steps: traces of torch's profiler, and memory."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt

from megarlhf.config.roles import FrozenModel

ConfigT = TypeVar("ConfigT")


class ProfileConfig(FrozenModel):
    """Record single steps into `run.dir/profile`, without changing the computation. A recorded step takes longer, so
    its times are not those of other steps."""

    steps: tuple[PositiveInt, ...] = ()
    """Steps, from 1, for which torch's profiler writes a trace: all operations with their times, inside the phases of
    the step, such as `train/actor`. One JSON file for each rank, in Chrome's trace format."""
    memory_snapshot: PositiveInt | None = None
    """Step whose allocations are recorded. On a GPU: a snapshot of torch's allocator with the stack of each
    allocation. On a CPU, where torch's allocator has no snapshots: a curve of the bytes that the step has allocated and
    not freed, without earlier allocations such as weights."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """Ranks that record; default: all."""

    @property
    def recorded(self) -> frozenset[int]:
        """Steps that are recorded in any way."""
        return frozenset(self.steps) | ({self.memory_snapshot} if self.memory_snapshot else set())

    def records_on(self, rank: int) -> bool:
        """Whether `rank` records anything."""
        return bool(self.recorded) and (self.ranks is None or rank in self.ranks)

    def require_steps(self, num_steps: int) -> None:
        """Raises: ValueError for a step beyond the last one of the run."""
        for key, steps in (("steps", self.steps), ("memory_snapshot", (self.memory_snapshot or 0,))):
            if beyond := sorted(step for step in steps if step > num_steps):
                raise ValueError(
                    f"profile.{key} names step {', '.join(map(str, beyond))}, and train.num_steps = {num_steps}; name "
                    "steps that the run has, the first is 1, or leave it out"
                )

    def require_ranks(self, world_size: int) -> None:
        """Raises: ValueError for a rank beyond the last one of the run."""
        if beyond := sorted(rank for rank in self.ranks or () if rank >= world_size):
            raise ValueError(
                f"profile.ranks names rank {', '.join(map(str, beyond))}, and the run has {world_size} rank(s); name "
                f"ranks from 0 to {world_size - 1}, or leave profile.ranks out to record on all of them"
            )

    def start_notes(self, world_size: int, *, on_cpu: bool) -> list[str]:
        """Notes for the start of a run."""
        if not self.recorded:
            return []
        steps = ", ".join(map(str, sorted(self.recorded)))
        ranks = f"all {world_size} rank(s)" if self.ranks is None else f"rank {', '.join(map(str, sorted(self.ranks)))}"
        notes = [f"profile: step {steps} is recorded by {ranks}, and takes longer than others"]
        if self.memory_snapshot is not None and on_cpu:
            notes.append(
                "profile.memory_snapshot: on a CPU, as here, a curve of the step's own allocations is written in place "
                "of a snapshot"
            )
        return notes


def check_profile_steps(cfg: ConfigT) -> ConfigT:
    """Validator of a whole configuration. Raises: ValueError for a profiled step beyond the last one of the run."""
    section: Any = cfg
    section.profile.require_steps(section.train.num_steps)
    return cfg
