"""Rewards as a user writes them, which a run names as `tests.distributed.user_rewards:NAME`."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from megarlhf.rollout.rewards.batch import RewardBatch


def sometimes(batch: RewardBatch) -> list[float | None]:
    """Does not apply to samples of an odd number."""
    return [
        None if sample % 2 else float(len(text)) for sample, text in zip(batch.samples, batch.responses, strict=True)
    ]


def short(prompt: str, response: str, fields: Mapping[str, Any]) -> float | None:
    """Whether a response has at most two characters; nothing of one that has a digit 7 in its prompt."""
    return None if "7" in prompt else float(len(response) <= 2)


def brief(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 for a response of at most two characters, else 0: which a random model gives sometimes."""
    return float(len(response) <= 2)


def right(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """An accuracy, and says so."""
    return float(response == fields["answer"])


right.is_accuracy = True  # type: ignore[attr-defined]


async def where(prompt: str, response: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Whether it runs in another process than the rank that wants it."""
    await asyncio.sleep(0)
    return {"score": 0.0, "in_a_worker": float(os.environ.get("RANK_OF_TEST") is None and _is_worker())}


def _is_worker() -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        return b"rewards.worker" in file.read()


def lucky(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 or 0, often the same for all responses to a prompt."""
    return float(sum(map(ord, response)) % 11 < 2)


def length(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """Characters of the response."""
    return float(len(response))
