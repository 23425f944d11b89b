"""Configuration of choices by held-out data: the best checkpoint, and an early end of the run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveInt, model_validator

from megarlhf.config.frozen import FrozenModel, NonNegative, Positive

Mode = Literal["min", "max"]

METRICS: Mapping[str, Mapping[str, Mode | None]] = {
    "sft": {"eval_loss": "min", "eval_perplexity": "min"},
    "rm": {"eval_loss": "min", "eval_pair_accuracy": "max", "eval_chosen_score": None, "eval_rejected_score": None},
    "dpo": {
        "eval_loss": "min",
        "eval_pair_accuracy": "max",
        "eval_reward_margin": "max",
        "eval_chosen_reward": None,
        "eval_rejected_reward": None,
        "eval_chosen_logprob": None,
        "eval_rejected_logprob": None,
    },
    "rl": {"eval_reward_mean": "max", "eval_accuracy": "max"},
}
"""Metrics of an evaluation on held-out data by command, and which direction is better; None: `mode` must be set."""
DEFAULT = {"sft": "eval_loss", "rm": "eval_loss", "dpo": "eval_loss", "rl": "eval_reward_mean"}
"""Default metric of `train.stop.patience` by command."""


@dataclass(frozen=True)
class Watched:
    """A metric of held-out data, with its better direction."""

    metric: str
    mode: Mode

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether `value` is better than `than` by more than `by`."""
        return value < than - by if self.mode == "min" else value > than + by

    @property
    def worst(self) -> float:
        """Start value that every value is better than."""
        return float("inf") if self.mode == "min" else -float("inf")


class BestConfig(FrozenModel):
    """Keep the checkpoint of the best evaluation on held-out data."""

    metric: str
    """Metric of `data.validation`, such as `eval_loss`, `eval_pair_accuracy`, `eval_accuracy` or `eval_reward_mean`.
    The choice makes it a validation figure: to measure the checkpoint, run `megarlhf eval` on `checkpoints/best` with
    test data. The run's own `test_...` figures are of the last step."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the lowest or the highest value is the best; `auto`: by the metric's name."""


class PatienceConfig(FrozenModel):
    """Early end of a run that does not improve on held-out data."""

    patience: PositiveInt | None = None
    """Stop when `metric` has not improved for this many evaluations. Only evaluations by `eval.every` count. The one
    after the last step does not, so that a prolonged run ends at the same step as one planned with that length."""
    metric: str | None = None
    """Metric of `data.validation`; default: `eval_loss`, and `eval_reward_mean` in `rl`. The choice makes it a
    validation figure, no test figure."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; `auto`: by the metric's name."""
    min_change: NonNegative = 0.0
    """Smallest difference that counts as an improvement; it must be exceeded."""

    @model_validator(mode="after")
    def _check_patience(self) -> PatienceConfig:
        if self.patience is None and (set_keys := self.changed("metric", "mode", "min_change")):
            raise ValueError(f"{', '.join(set_keys)} without patience, which they are about; set patience too")
        return self


class StopConfig(PatienceConfig):
    """Rules that end a run early."""

    max_kl: Positive | None = None
    """Stop when `kl` (mean per response token, against the reference) exceeds this on average over the last
    `max_kl_steps` steps."""
    max_kl_steps: PositiveInt = 4
    """Steps of that average, as a single step's estimate is noisy. A younger run averages over the steps that it
    has."""
    validation_reward_patience: PositiveInt | None = None
    """Earlier name of `patience` with `metric: eval_reward_mean`."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_name(cls, data: Any) -> Any:
        if not isinstance(data, dict) or (earlier := data.get("validation_reward_patience")) is None:
            return data
        if any(data.get(key) not in (None, "auto", "eval_reward_mean") for key in ("metric", "mode")):
            raise ValueError("validation_reward_patience is about eval_reward_mean; give patience with another metric")
        if data.get("patience") not in (None, earlier):
            raise ValueError(
                f"validation_reward_patience = {earlier} is an earlier name of patience = {data['patience']}; give one"
            )
        return {**data, "patience": earlier, "metric": "eval_reward_mean"}


def watched(command: str, key: str, metric: str | None, mode: Literal["auto", "min", "max"]) -> Watched:
    """The metric of section `key` (for messages), with its better direction.

    Raises: ValueError for a metric that the command's evaluations do not have, or whose direction is unknown.
    """
    known = METRICS[command]
    metric = metric or DEFAULT[command]
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        raise ValueError(
            f"{key}.metric = {metric!r} is no metric of {command}'s held-out data"
            + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}")
        )
    direction = known[metric] if mode == "auto" else mode
    if direction is not None:
        return Watched(metric, direction)
    raise ValueError(f"{key}.metric = {metric!r}: which way is better is not in its name; set {key}.mode to min or max")


def check_choices(cfg: Any) -> None:
    """Raises: ValueError for a choice by figures that the run does not measure."""
    best, stop = cfg.checkpoint.best, cfg.train.stop
    sections = {"checkpoint.best": best, "train.stop": stop if stop.patience is not None else None}
    for key, section in sections.items():
        if section is None:
            continue
        if not (cfg.eval.every and cfg.data.has_validation):
            name = f"{key}.patience" if section is stop else key
            raise ValueError(f"{name} counts evaluations: set eval.every and data.validation")
        watched(cfg.command, key, section.metric, section.mode)
