"""Configuration of a run, its directory and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megarlhf.config.choices import BestConfig
from megarlhf.config.roles import FrozenModel, NonNegative
from megarlhf.config.tracking import WandbConfig


class RunConfig(FrozenModel):
    dir: Path
    """Run directory: resolved config, metrics, TensorBoard events, checkpoints. It belongs to one run at a time, which
    holds the file `lock` there while it runs."""
    on_existing: Literal["resume", "refuse", "overwrite"] = "resume"
    """Handling of an earlier run in `dir`. `resume`: continue an earlier run of the same command from its last resume
    point; without one, start a new run. A run that has finished is refused, unless `train.num_steps` has grown since.
    So is a run of another command, and one whose configuration computes something else (see `allow_changes`).
    `generate` and `eval` cannot continue: for them it means `refuse`. `refuse`: refuse any earlier run. `overwrite`:
    start over. It removes only what an earlier run of the same command wrote there (configuration, metrics, lengths,
    TensorBoard events, checkpoints, resume points, rollout bank, profiles, responses.jsonl). It is refused when Slurm
    has queued the job again, because it would remove what the first attempt wrote."""
    allow_changes: bool = False
    """Continue an earlier run even if the configuration has changed in what is computed, such as a learning rate, a
    loss or the data. The changes are listed at the start. Without it such a start is refused. Changes of layout, of
    memory and of the checkpoints' cadence are always allowed."""
    nproc: PositiveInt = 1
    """Local ranks that a plain start launches. torchrun and srun set their own number."""
    world_size: PositiveInt | None = None
    """Number of ranks that the file is written for; default: `nproc`. It starts no ranks. `megarlhf plan` and
    `--dry-run` plan and check this many ranks, even on a machine without them, and a start with another number reports
    it."""
    seed: NonNegativeInt = 0
    """Seed of all random numbers: weights, data order, samples."""
    deterministic: bool = False
    """Give the same bits in every run on GPUs of one kind. Otherwise some kernels add in an order that changes from run
    to run. Kernels with a fixed order are slower, and an operation without one is refused at the start. On a CPU runs
    always repeat bit for bit."""
    wandb: WandbConfig = WandbConfig()

    @property
    def planned_ranks(self) -> int:
        """Number of ranks that the file is written for."""
        return self.world_size or self.nproc

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        if isinstance(data, dict) and "logger" in data:
            raise ValueError(
                f"logger = {data['logger']} is no longer read: TensorBoard's events are always written. For Weights & "
                "Biases write run.wandb={project: NAME}"
            )
        return data


class CheckpointConfig(FrozenModel):
    """Two kinds of checkpoint. A *resume point* is sharded and holds everything that a run needs to continue exactly;
    it is written during training. An *export* is a Hugging Face directory for use elsewhere; the last step always gets
    one."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between resume points; 0: not by steps. With all three cadences 0 a resume point is written only when the
    run is asked to stop."""
    every_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates between resume points, also inside a step of `rl`, together with the step's samples; 0: not by
    updates. 1 loses at most one update. The updates of actor and critic by one mini-batch count as one."""
    every_minutes: NonNegative = 15.0
    """Minutes between resume points; 0: not by time."""
    keep: PositiveInt = 2
    """Number of newest resume points to keep."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep permanently the first resume point at or after each step that is a multiple of this; 0: none."""
    background: bool = True
    """Write resume points during training; false: training waits until a point is complete."""
    seconds_before_end: NonNegative = 60.0
    """Margin before the end of a Slurm job. The run saves and ends, to be queued again, when the time left is shorter
    than the longest step, the longest save and these seconds together."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """Steps between exports; 0: after the last step only."""
    export_keep: PositiveInt | None = None
    """Number of newest exports to keep, in addition to that of `best`; default: all."""
    best: BestConfig | None = None
    """Also export after each step whose evaluation is the best so far, and point `checkpoints/best` at it. The
    evaluation before the first step does not count."""

    @property
    def by_cadence(self) -> bool:
        """Whether resume points are written by steps, updates or time."""
        return bool(self.every or self.every_updates or self.every_minutes)
