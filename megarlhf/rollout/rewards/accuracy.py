"""Which reward of held-out responses is an accuracy, and the accuracy.

Legend: N held-out responses.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megarlhf.config import RewardConfig
from megarlhf.config.rewards import labels_of
from megarlhf.rollout.rewards.rules import ACCURACIES, RULES, load_rule, rule_with

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AccuracyOf:
    """What `eval_accuracy` is of."""

    label: str | None
    """The reward's name; None: there is no accuracy."""
    judge: RewardConfig | None = None
    """A rule that is none of the run's rewards, and judges held-out responses only."""
    note: str = ""
    """What to tell the user, where there is none although nobody said so."""


def accuracy_of(name: str | None, rewards: Sequence[RewardConfig]) -> AccuracyOf:
    """From `eval.accuracy` and the rewards of the run.

    Raises: ValueError for a name that is neither a reward's nor a rule's, and for a reward model.
    """
    labels = labels_of(rewards)
    if name is None:
        known = [label for label, reward in zip(labels, rewards, strict=True) if _says_0_or_1(reward)]
        if len(known) == 1:
            return AccuracyOf(known[0])
        found = f"{', '.join(known)} all do" if known else "none of rewards is known to"
        return AccuracyOf(
            None,
            note=(
                f"there is no eval_accuracy: {found} say 0 or 1. Name the reward or the rule by eval.accuracy, such as "
                "eval.accuracy=exact_match, which compares a response with the record's `answer`"
            ),
        )
    if name in labels:
        if rewards[labels.index(name)].kind == "model":
            raise ValueError(
                f"eval.accuracy = {name!r} is the reward model, whose score is no accuracy; name a reward that says 0 "
                f"or 1, or a rule: {', '.join(RULES)} or package.module:function"
            )
        return AccuracyOf(name)
    if name not in RULES and ":" not in name:
        known = [*labels, *RULES]
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"eval.accuracy = {name!r} is no name in rewards and no rule; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + f"Known are {', '.join(dict.fromkeys(known))}, and functions as package.module:function"
        )
    args = ACCURACIES.get(name, {})
    rule_with(name, args)
    return AccuracyOf(name, RewardConfig(kind="rule", rule=name, args=args))


def accuracy_metrics(of: AccuracyOf, values_N: Tensor) -> dict[str, float | None]:
    """`eval_accuracy` over the responses of which the reward says something, `eval_accuracy_none`: how many there are
    of which it says nothing (NaN). Values that are not 0 or 1 have no accuracy: it is null then, and the log says why.
    """
    said_N = values_N[~values_N.isnan()]
    metrics: dict[str, float | None] = {"eval_accuracy_none": len(values_N) - len(said_N), "eval_accuracy": None}
    other_N = said_N[(said_N != 0) & (said_N != 1)]
    if len(other_N):
        log.warning(
            "eval.accuracy: %s said %g of a held-out response, and %d times something else than 0 or 1: there is no "
            "eval_accuracy of it; name another reward or rule",
            of.label,
            float(other_N[0]),
            len(other_N),
        )
    elif len(said_N):
        metrics["eval_accuracy"] = float(said_N.double().mean())
    return metrics


def _says_0_or_1(reward: RewardConfig) -> bool:
    """As far as it is known before it has said anything."""
    if reward.rule is None:
        return False
    if reward.rule in ACCURACIES:
        return ACCURACIES[reward.rule].items() <= reward.args.items()
    return bool(getattr(load_rule(reward.rule), "is_accuracy", False))
