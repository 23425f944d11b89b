"""A conversation with an environment as people, rewards and files read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarlhf.data.sample_types import PromptSample
from megarlhf.rollout.environments.answer import Messages


@dataclass(frozen=True)
class Transcript:
    """A conversation with the texts of the model's turns."""

    turns: list[str]
    """Text of each turn of the model."""
    before: str
    """All text before the last turn, as the chat template writes it."""
    messages: list[dict[str, Any]] | None
    """Messages before the last turn; None where prompts are texts."""

    @property
    def whole(self) -> list[dict[str, Any]] | None:
        """All messages, the last turn included; None where prompts are texts."""
        return None if self.messages is None else continued(self.messages, self.turns[-1])


def messages_of_turns(
    prompt: PromptSample, observations: Sequence[Messages | str], turns: Sequence[str]
) -> list[dict[str, Any]]:
    """Messages of a conversation: the prompt's, then each of `observations`, followed by the turn of `turns`.

    An observation that is a text goes on inside the assistant's message.
    """
    messages = [dict(message) for message in prompt.messages]
    for n, observation in enumerate(observations):
        if not isinstance(observation, str):
            messages += [dict(message) for message in observation]
        elif observation:
            messages = continued(messages, observation)
        if n < len(turns):
            messages = continued(messages, turns[n])
    return messages


def continued(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Messages with a text added to the assistant's message at the end, which is made if there is none."""
    before, begun = open_answer(messages)
    return [*before, {"role": "assistant", "content": begun + text}]


def open_answer(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Messages before the assistant's present one, and what that says already."""
    if messages[-1]["role"] == "assistant":
        return list(messages[:-1]), messages[-1]["content"]
    return list(messages), ""
