"""A conversation with an environment as people, rewards and files read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Transcript:
    """A conversation with the texts of the model's turns."""

    turns: list[str]
    """Text of each turn of the model."""
    before: str
    """All text before the last turn, as the chat template writes it."""
    messages: list[dict[str, Any]] | None = None
    """Messages before the last turn; None where prompts are texts. The last one is the assistant's if the environment
    has answered inside the turn: what is written of it."""
    whole: list[dict[str, Any]] | None = None
    """All messages, the last turn included; None where prompts are texts."""


def open_answer(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Messages before the assistant's present one, and what that says already."""
    if messages[-1]["role"] == "assistant":
        return list(messages[:-1]), messages[-1]["content"]
    return list(messages), ""
