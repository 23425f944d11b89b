"""Configuration of a run and of what it keeps of itself."""

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
    holds `lock` there while it runs."""
    on_existing: Literal["resume", "refuse", "overwrite"] = "resume"
    """What to do when `dir` holds an earlier run. `resume`: an earlier run of the same command goes on where it was
    last saved (a new run begins where there is none). A run that has finished is refused, unless `train.num_steps` has
    grown since; so is one of another command, and one whose configuration computes something else (see
    `allow_changes`). `generate` and `eval` have nothing to go on with: for them it means `refuse`. `refuse`: any
    earlier run is refused. `overwrite` starts over: it removes what an earlier run of the same command wrote there
    (configuration, metrics, lengths, TensorBoard events, checkpoints, resume points, rollout bank, profiles,
    responses.jsonl) and nothing else. It is refused when Slurm has queued the job again, because it would remove what
    the first attempt wrote."""
    allow_changes: bool = False
    """Go on with an earlier run although the configuration has changed in what is computed, such as a learning rate, a
    loss or the data. The changes are listed at the start. Without it such a start is refused. Changes of layout, of
    memory and of the checkpoints' cadence need no permission."""
    nproc: PositiveInt = 1
    """Local ranks that a plain start launches; torchrun and srun decide for themselves."""
    world_size: PositiveInt | None = None
    """Ranks of the job that the file is for; default: `nproc`. It starts none. `megarlhf plan` and `--dry-run` plan and
    check that many ranks, also where they are not, and a start with another number says so."""
    seed: NonNegativeInt = 0
    """Everything random follows from it: weights, data order, samples."""
    deterministic: bool = False
    """The same bits from every run on GPUs of one kind. Without it some kernels add in an order that changes from run
    to run. Kernels with a fixed order are slower, and what has none is refused at the start. On a CPU runs repeat bit
    for bit anyway."""
    wandb: WandbConfig = WandbConfig()

    @property
    def planned_ranks(self) -> int:
        """Ranks of the job that the file is for."""
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
    """Two kinds of checkpoint. A *resume point* holds all that a run needs to go on exactly, sharded, and is written
    while training goes on. An *export* is a Hugging Face directory for people to use; the last step always gets one."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between resume points; 0: not by steps. With all three cadences 0 a resume point is written only when the
    run is asked to stop."""
    every_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates between resume points, also inside a step of `rl`, together with the step's samples; 0: not by
    updates. 1 loses at most one update. An update is that of a mini-batch, of actor and critic together."""
    every_minutes: NonNegative = 15.0
    """Minutes between resume points; 0: not by time."""
    keep: PositiveInt = 2
    """Keep the newest so many resume points."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep also, for good, the first resume point at or after each step that is a multiple of this; 0: none."""
    background: bool = True
    """Write resume points while training goes on; false: training waits until a point is complete."""
    seconds_before_end: NonNegative = 60.0
    """A run in a Slurm job saves and ends, to be queued again, when the time left in the job is shorter than the
    longest step, the longest save and these seconds together."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """Steps between exports; 0: after the last step only."""
    export_keep: PositiveInt | None = None
    """Keep only the newest so many exports, and the one of `best`."""
    best: BestConfig | None = None
    """Export also after each step whose evaluation is the best so far, and point `checkpoints/best` at it. Evaluations
    count from the first after a step on; the model that the run began with is not among them."""

    @property
    def by_cadence(self) -> bool:
        """Whether resume points are written without being asked for."""
        return bool(self.every or self.every_updates or self.every_minutes)
