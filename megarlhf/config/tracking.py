"""Configuration of a run's output: tables of samples, Weights & Biases, and the accuracy."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.roles import FrozenModel


class SamplesConfig(FrozenModel):
    """Tables of samples in `run.dir/samples`: prompts, responses, and their rewards."""

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between two tables of training samples; 0: no tables of training. Each evaluation has its own table."""
    count: Annotated[int, Field(ge=0)] = 8
    """Rows of a table, spread evenly over the samples of the step, or over the held-out prompts, which are the same
    ones in every evaluation. 0: no tables at all."""


class WandbConfig(FrozenModel):
    """Logging to Weights & Biases, with the same names as in `metrics.jsonl` and TensorBoard; needs `wandb`."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] | None = None
    """Project of the run; without one nothing is logged to Weights & Biases."""
    name: str | None = None
    """Name of the run; default: the name of `run.dir`."""
    entity: str | None = None
    """User or team; default: that of the account."""
    group: str | None = None
    """Group of runs that belong together, such as seeds."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: write to `run.dir/wandb` only, for nodes without a network; `wandb sync` uploads it later."""
    timeout_seconds: PositiveInt = 60
    """Time limit of a start for the server, after which the start is refused, and of an end for unsent data, which then
    stays in `run.dir/wandb`."""

    @model_validator(mode="after")
    def _check_project(self) -> Self:
        if self.project is None and (changed := self.changed()):
            raise ValueError(f"{', '.join(changed)} without project has no effect; set run.wandb.project too")
        return self


class AccuracyConfig(FrozenModel):
    """Reward of held-out responses that is an accuracy."""

    accuracy: str | None = None
    """Reward or rule whose mean is `eval_accuracy`: the name of one of `rewards`, or a rule (built in, or
    `package.module:function`) that judges held-out responses only. Its values must be 0 or 1; a response with None is
    left out and counted in `eval_accuracy_none`. Default: the only one of `rewards` that is known to be 0 or 1:
    `exact_match`, `numeric_match`, or a function of yours with the attribute `is_accuracy = True`. With none or several
    of them there is no `eval_accuracy`, and the start reports it."""
