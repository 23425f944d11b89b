"""Configuration of what a run shows of itself: tables of samples, Weights & Biases, the reward that is an accuracy."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.roles import FrozenModel


class SamplesConfig(FrozenModel):
    """Tables of samples in `run.dir/samples`: prompts, responses, and what the rewards said of them."""

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between two tables of training samples; 0: none of training. Each evaluation has a table of its own."""
    count: Annotated[int, Field(ge=0)] = 8
    """Rows of a table, spread evenly over the samples of the step or over the held-out prompts: of an evaluation these
    are the same prompts each time. 0: no tables at all."""


class WandbConfig(FrozenModel):
    """A run of Weights & Biases beside `metrics.jsonl` and TensorBoard, with the same names; needs `wandb`."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] | None = None
    """Where the run is listed; without one nothing is logged to Weights & Biases."""
    name: str | None = None
    """Of the run; default: the name of `run.dir`."""
    entity: str | None = None
    """User or team; default: that of the account."""
    group: str | None = None
    """Of runs that belong together, such as seeds."""
    tags: tuple[str, ...] = ()
    """To find the run by."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: written to `run.dir/wandb` only, for nodes without a network; `wandb sync` hands it on later."""
    timeout_seconds: PositiveInt = 60
    """How long a start waits for the server, after which it is refused, and an end for what is still to be sent, which
    stays in `run.dir/wandb` after that."""

    @model_validator(mode="after")
    def _of_a_project(self) -> Self:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if changed and self.project is None:
            raise ValueError(f"{', '.join(changed)} without project, which says where; set run.wandb.project too")
        return self


class AccuracyConfig(FrozenModel):
    """Which reward of held-out responses is an accuracy."""

    accuracy: str | None = None
    """What `eval_accuracy` is the mean of: a reward by its name in `rewards`, or a rule (of the registry, or
    `package.module:function`) that judges held-out responses only. It must say 0 or 1; a response of which it says None
    is left out and counted in `eval_accuracy_none`. Default: the only one of `rewards` that is known to say 0 or 1:
    `exact_match`, `numeric_match`, a function of yours with the attribute `is_accuracy = True`. Where there is none, or
    several, there is no `eval_accuracy`, and the start says so."""
