"""Accuracy of held-out responses: the reward that it is computed from, and its metrics.

Legend: N held-out responses.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megarlhf.config import RewardConfig
from megarlhf.config.rewards import unique_labels
from megarlhf.rollout.rewards.rules import ACCURACIES, RULES, bind_rule, load_rule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AccuracySource:
    """Reward or rule that `eval_accuracy` is the mean of."""

    label: str | None
    """Name of the reward; None: there is no accuracy."""
    judge: RewardConfig | None = None
    """Rule that judges held-out responses only, and is none of the run's rewards."""
    note: str = ""
    """Explanation for the user if there is no accuracy and none was asked for."""


def find_accuracy(name: str | None, rewards: Sequence[RewardConfig]) -> AccuracySource:
    """Choose the source of the accuracy by `eval.accuracy` (`name`) and the rewards of the run.

    Raises: ValueError for a name of neither a reward nor a rule, and for a reward model.
    """
    labels = unique_labels(rewards)
    if name is None:
        known = [label for label, reward in zip(labels, rewards, strict=True) if _is_accuracy(reward)]
        if len(known) == 1:
            return AccuracySource(known[0])
        candidates = f"{', '.join(known)} all do" if known else "none of rewards is known to"
        return AccuracySource(
            None,
            note=(
                f"there is no eval_accuracy: {candidates} say 0 or 1. Name the reward or the rule by eval.accuracy, "
                "such as eval.accuracy=exact_match, which compares a response with the record's `answer`"
            ),
        )
    if name in labels:
        if rewards[labels.index(name)].kind == "model":
            raise ValueError(
                f"eval.accuracy = {name!r} is the reward model, whose score is no accuracy; name a reward that says 0 "
                f"or 1, or a rule: {', '.join(RULES)} or package.module:function"
            )
        return AccuracySource(name)
    if name not in RULES and ":" not in name:
        known = [*labels, *RULES]
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"eval.accuracy = {name!r} is no name in rewards and no rule; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + f"Known are {', '.join(dict.fromkeys(known))}, and functions as package.module:function"
        )
    args = ACCURACIES.get(name, {})
    bind_rule(name, args)
    return AccuracySource(name, RewardConfig(kind="rule", rule=name, args=args))


def accuracy_metrics(source: AccuracySource, values_N: Tensor) -> dict[str, float | None]:
    """`eval_accuracy`: mean over the responses that have a value. `eval_accuracy_none`: number of responses without one
    (NaN). If a value is neither 0 nor 1 the accuracy is null and the log says why.
    """
    known_N = values_N[~values_N.isnan()]
    metrics: dict[str, float | None] = {"eval_accuracy_none": len(values_N) - len(known_N), "eval_accuracy": None}
    other_N = known_N[(known_N != 0) & (known_N != 1)]
    if len(other_N):
        log.warning(
            "eval.accuracy: %s returned %g for a held-out response, and %d times a value other than 0 or 1: there is "
            "no eval_accuracy of it; name another reward or rule",
            source.label,
            float(other_N[0]),
            len(other_N),
        )
    elif len(known_N):
        metrics["eval_accuracy"] = float(known_N.double().mean())
    return metrics


def _is_accuracy(reward: RewardConfig) -> bool:
    """Whether the reward is known to be 0 or 1 before it is computed."""
    if reward.rule is None:
        return False
    if reward.rule in ACCURACIES:
        return ACCURACIES[reward.rule].items() <= reward.args.items()
    return bool(getattr(load_rule(reward.rule), "is_accuracy", False))
