"""Configuration of what held-out data decides: which checkpoint is the best one, and when a run ends early."""

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
"""By command, what each evaluation of held-out data gives, and which way is better; None: that has to be said."""
DEFAULT = {"sft": "eval_loss", "rm": "eval_loss", "dpo": "eval_loss", "rl": "eval_reward_mean"}
"""Which of them `train.stop.patience` is about."""


@dataclass(frozen=True)
class Watched:
    """A metric of held-out data that decides something."""

    metric: str
    mode: Mode

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether `value` is better, by more than `by`."""
        return value < than - by if self.mode == "min" else value > than + by

    @property
    def worst(self) -> float:
        """Than which every value is better."""
        return float("inf") if self.mode == "min" else -float("inf")


class BestConfig(FrozenModel):
    """Keep the checkpoint of the best evaluation on held-out data."""

    metric: str
    """By which: a metric of `data.validation`, such as `eval_loss`, `eval_pair_accuracy`, `eval_accuracy` or
    `eval_reward_mean`. Choosing by it makes it a validation figure: what the checkpoint is worth, `megarlhf eval`
    of `checkpoints/best` on test data says. The run's own `test_...` figures are of the last step."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the lowest or the highest value is the best; `auto`: as the metric's name says."""


class PatienceConfig(FrozenModel):
    """When a run ends because held-out data says that it gets no better."""

    patience: PositiveInt | None = None
    """Stop when `metric` has not got better for so many evaluations. Those count that `eval.every` makes due; the one
    after the last step of a run does not, so that a prolonged run ends where one planned so long would."""
    metric: str | None = None
    """Of `data.validation`; default: `eval_loss`, and `eval_reward_mean` in `rl`. Choosing the end of the run by it
    makes it a validation figure, no test figure."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; `auto`: as the metric's name says."""
    min_change: NonNegative = 0.0
    """What differs by no more is not better."""

    @model_validator(mode="after")
    def _of_a_patience(self) -> PatienceConfig:
        names = ("metric", "mode", "min_change")
        set_keys = [name for name in names if getattr(self, name) != PatienceConfig.model_fields[name].default]
        if set_keys and self.patience is None:
            raise ValueError(f"{', '.join(set_keys)} without patience, which they are about; set patience too")
        return self


class StopConfig(PatienceConfig):
    """Rules that end a run early."""

    max_kl: Positive | None = None
    """Stop when `kl` (mean per response token, against the reference) exceeds this, as the mean of some last steps."""
    max_kl_steps: PositiveInt = 4
    """How many: a single step's estimate is noisy. Before there are as many, those that there are."""
    validation_reward_patience: PositiveInt | None = None
    """An earlier name of `patience` with `metric: eval_reward_mean`."""

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
    """`key`: of the section, for messages. Raises: ValueError for a metric that no evaluation of the command gives, or
    of which it is not known which way is better."""
    known = METRICS[command]
    metric = metric or DEFAULT[command]
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        raise ValueError(
            f"{key}.metric = {metric!r} is no metric of {command}'s held-out data"
            + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}")
        )
    found = known[metric] if mode == "auto" else mode
    if found is not None:
        return Watched(metric, found)
    raise ValueError(f"{key}.metric = {metric!r}: which way is better is not in its name; set {key}.mode to min or max")


def check_choices(
    command: str, *, has_validation: bool, every: int, best: BestConfig | None, stop: PatienceConfig
) -> None:
    """Raises: ValueError for a choice by figures that there are not."""
    asked = {"checkpoint.best": best, "train.stop": stop if stop.patience is not None else None}
    for key, section in asked.items():
        if section is None:
            continue
        if not (every and has_validation):
            name = f"{key}.patience" if section is stop else key
            raise ValueError(f"{name} counts evaluations: set eval.every and data.validation")
        watched(command, key, section.metric, section.mode)
