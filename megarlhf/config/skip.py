"""Configuration of optimizer steps that are left out because of their numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from megarlhf.config.roles import FrozenModel, Positive


class SkipConfig(FrozenModel):
    """Which optimizer steps are skipped: always those whose loss or gradient is NaN or infinite, and on request those
    with a spike of the gradient norm. A skipped step changes no weight, no optimizer state and no learning rate, on any
    rank; it counts in the metric `skipped_steps`. Its batch and the weights before it are kept in a folder of
    `run.dir/failures/`, of the newest five skipped steps; `megarlhf replay FOLDER` repeats one.
    """

    max_skipped_in_a_row: PositiveInt = 3
    """The run ends with status 4 when so many optimizer steps of one role in a row were skipped. 1: at the first."""
    skip_grad_norm_above: Positive | None = None
    """Also skip a step whose gradient norm (before clipping) is above this."""
    skip_grad_norm_factor: Annotated[float, Field(gt=1.0)] | None = None
    """Also skip a step whose gradient norm is above this times the median of the role's last 64 steps that were not
    skipped; from the 16th of them on."""
