"""Configuration of optimizer steps that are skipped for bad numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from megarlhf.config.roles import FrozenModel, Positive


class SkipConfig(FrozenModel):
    """Skipped optimizer steps: always those whose loss or gradient is NaN or infinite, and on request those with a
    spike of the gradient norm. A skipped step changes no weight, no optimizer state and no learning rate on any rank;
    the metric `skipped_steps` counts it. For the newest five skipped steps a folder in `run.dir/failures/` keeps the
    batch and the weights before the step; `megarlhf replay FOLDER` repeats one.
    """

    max_skipped_in_a_row: PositiveInt = 3
    """Number of consecutive skipped optimizer steps of one role that end the run with status 4. 1: the first one."""
    skip_grad_norm_above: Positive | None = None
    """Also skip a step whose gradient norm (before clipping) is above this."""
    skip_grad_norm_factor: Annotated[float, Field(gt=1.0)] | None = None
    """Also skip a step whose gradient norm is above this multiple of the median of the role's last 64 steps that were
    not skipped, once there are 16 of them."""
