"""Configuration of the user's own metrics and observers."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator, model_validator

from megarlhf.config.frozen import FrozenModel
from megarlhf.config.own_names import PathOnly


class ObserveConfig(FrozenModel):
    """Own code that looks at each step and changes nothing. It runs on rank 0 and gets copies."""

    metrics: tuple[PathOnly, ...] = ()
    """Functions `metric(step)` that return a number, or numbers by name, for the metrics of the step."""
    observers: tuple[PathOnly, ...] = ()
    """Functions `observer(step)`, or classes with a method `after_step(step)`. They may return metrics too. A class
    may keep state, with `state_dict` and `load_state_dict`."""

    @field_validator("metrics", "observers", mode="before")
    @classmethod
    def _single(cls, value: Any) -> Any:
        """Take one import path for a list of one."""
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> ObserveConfig:
        if repeated := sorted({path for path in self.paths if self.paths.count(path) > 1}):
            raise ValueError(f"{', '.join(repeated)} is named more than once; once will do")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.metrics, *self.observers)
