"""Rewards that are right in the first step of a run and wrong in the second, each in its own way: a run names them as
`tests.distributed.bad_rewards:NAME`. A run has one rank and 16 responses a step."""

import itertools
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from megarlhf.rollout.rewards.batch import RewardBatch

_CALLS = itertools.count()


def _is_first_step() -> bool:
    return next(_CALLS) < 16


def raises(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    return 1.0 if _is_first_step() else 1.0 / fields["no_such_field"]


def nothing(prompt: str, response: str, fields: Mapping[str, Any]) -> float | None:
    return 1.0 if _is_first_step() else None


def nan(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    return 1.0 if _is_first_step() else float("nan")


def a_list(prompt: str, response: str, fields: Mapping[str, Any]) -> Any:
    return 1.0 if _is_first_step() else [1.0]


def a_string(prompt: str, response: str, fields: Mapping[str, Any]) -> Any:
    return 1.0 if _is_first_step() else "1.0"


def wrong_length(batch: RewardBatch) -> list[float]:
    return [1.0] * (len(batch) if next(_CALLS) == 0 else len(batch) - 1)


def never_returns(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    if not _is_first_step():
        time.sleep(1000)
    return 1.0


def exits(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    if not _is_first_step():
        os._exit(7)
    return 1.0


def calls_exit(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    if not _is_first_step():
        sys.exit(0)
    return 1.0


async def _later() -> float:
    return 1.0


def forgot_async(prompt: str, response: str, fields: Mapping[str, Any]) -> Any:
    return 1.0 if _is_first_step() else _later()


def yields(prompt: str, response: str, fields: Mapping[str, Any]) -> Any:
    """Refused at the start."""
    yield 1.0


def always_raises(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    raise KeyError("no judge")


def raises_for_short(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    if len(response) < 3:
        raise KeyError("too short for the judge")
    return float(len(response))
