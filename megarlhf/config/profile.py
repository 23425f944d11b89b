"""Configuration of what is recorded of single steps: traces of torch's profiler, and memory."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt

from megarlhf.config.roles import FrozenModel

ConfigT = TypeVar("ConfigT")


class ProfileConfig(FrozenModel):
    """Records single steps into `run.dir/profile`, without changing what is computed. A step that is recorded takes
    longer, so its times are not those of other steps."""

    steps: tuple[PositiveInt, ...] = ()
    """Steps of which torch's profiler writes a trace, from 1: all operations with their times, inside the phases of the
    step, such as `train/actor`. A JSON file a rank, in Chrome's trace format."""
    memory_snapshot: PositiveInt | None = None
    """A step whose allocations are recorded. On a GPU: a snapshot of torch's allocator with the stack of each
    allocation. On a CPU, where torch's allocator keeps none: a curve of the bytes that the step itself has allocated
    and not freed; what was there before, such as weights, is not in it."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """Which ranks record; default: all."""

    @property
    def recorded(self) -> frozenset[int]:
        """The steps of which anything is recorded."""
        return frozenset(self.steps) | ({self.memory_snapshot} if self.memory_snapshot else set())

    def records_on(self, rank: int) -> bool:
        """Whether that rank records anything."""
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
        """Raises: ValueError for a rank that a run of so many has not."""
        if beyond := sorted(rank for rank in self.ranks or () if rank >= world_size):
            raise ValueError(
                f"profile.ranks names rank {', '.join(map(str, beyond))}, and the run has {world_size} rank(s); name "
                f"ranks from 0 to {world_size - 1}, or leave profile.ranks out to record on all of them"
            )

    def start_notes(self, world_size: int, *, on_cpu: bool) -> list[str]:
        """What a start should say about it, in sentences."""
        if not self.recorded:
            return []
        steps = ", ".join(map(str, sorted(self.recorded)))
        ranks = f"all {world_size} rank(s)" if self.ranks is None else f"rank {', '.join(map(str, sorted(self.ranks)))}"
        notes = [f"profile: step {steps} is recorded by {ranks}, and takes longer than others"]
        if self.memory_snapshot is not None and on_cpu:
            notes.append(
                "profile.memory_snapshot: on a CPU, as this machine has it, a curve of what the step itself allocates "
                "is written in place of a snapshot"
            )
        return notes


def check_profile_steps(cfg: ConfigT) -> ConfigT:
    """A check of a whole configuration: its `profile` names steps that the run has."""
    whole: Any = cfg
    whole.profile.require_steps(whole.train.num_steps)
    return cfg
