"""Interface of a user's environment: what it gets and returns.

An environment is a class. A conversation has an object of its own, so that it may keep its state in `self`:

    class Guess:
        def __init__(self, highest=100): ...      # `environment.args` of the configuration
        def reset(self, fields, seed): ...        # -> None, or messages that follow the prompt
        def step(self, turn):                     # a turn of the model -> Answer
            return Answer([{"role": "user", "content": "higher"}])
        def close(self): ...                      # optional: the conversation is over

Each method may be `async def`. Only the standard library is imported: the processes of environments load this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarlhf.own_code.failures import short

Messages = Sequence[Mapping[str, Any]]

FP32_MAX = (2 - 2**-23) * 2.0**127
"""Largest reward: columns of rewards are fp32."""
LONGEST = 16 * 2**20
"""Most bytes of an answer as JSON. A longer one would have no room in any conversation."""


class WrongAnswer(ValueError):
    """Return value of an environment that is no answer. The message says why."""


@dataclass(frozen=True)
class Turn:
    """A turn of the model."""

    text: str
    """Without the token that ends it. Other special tokens, such as one that begins a call, have their name."""
    number: int
    """0 is the first."""
    finished: bool
    """Whether the model ended it; False: it was cut at a limit."""
    last: bool
    """Whether no turn can follow, because a limit is reached. Messages of the answer are then discarded."""
    opened: str = ""
    """Mark of a thought, such as `<think>`, that the chat template has written before the turn; else empty."""


@dataclass(frozen=True)
class Answer:
    """An environment's answer to a turn.

    With neither messages nor `done` the environment has nothing to say, and the model has ended the conversation.
    """

    messages: Messages | str = ()
    """Messages, each with `role` and `content`, or a text. A text is written as it is, without the chat template."""
    reward: float | None = None
    """Reward of the turn; None: none."""
    done: bool = False
    """Whether the conversation is over. Messages are then discarded."""

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values; `from_json` is the inverse."""
        return {"messages": self.messages, "reward": self.reward, "done": self.done}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Answer:
        """The answer of `to_json`."""
        return Answer(value["messages"], value["reward"], value["done"])


def answer_of(returned: Any) -> Answer:
    """Check what `step` returned. Raises: WrongAnswer for anything but an `Answer` with valid fields."""
    if not isinstance(returned, Answer):
        hint = "declare `step` with `async def`" if hasattr(returned, "__await__") else "return megarlhf.Answer(...)"
        raise WrongAnswer(f"returned {short(returned)} from step, expected an Answer; {hint}")
    if not isinstance(returned.done, bool):
        raise WrongAnswer(f"returned an Answer with done = {short(returned.done)}, expected True or False")
    return Answer(_messages(returned.messages, "step"), _reward(returned.reward), returned.done)


def opening_of(returned: Any) -> Answer:
    """Check what `reset` returned, and return it as an answer. Raises: WrongAnswer for anything but None or
    messages."""
    if isinstance(returned, Answer):
        raise WrongAnswer("returned an Answer from reset, expected None or messages that follow the prompt")
    return Answer([] if returned is None else _messages(returned, "reset"))


def _messages(given: Any, method: str) -> list[dict[str, Any]] | str:
    """Messages as plain JSON values."""
    where = f"returned {short(given)} as messages from {method}"
    if isinstance(given, str):
        messages: Any = given
    elif isinstance(given, Mapping) or not isinstance(given, Sequence) or isinstance(given, bytes):
        raise WrongAnswer(f"{where}, expected a list of messages or a text; put one message into a list")
    else:
        for message in given:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise WrongAnswer(f"{where}: {short(message)} is no message; give each a role and a content")
            if message["role"] in ("assistant", "system", "developer"):
                raise WrongAnswer(
                    f"{where}: a message has the role {message['role']!r}, which is not an environment's to write; "
                    "write as user or tool"
                )
        messages = [{**message, "content": _joined(message["content"])} for message in given]
    try:
        written = json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise WrongAnswer(
            f"{where}, which JSON cannot hold ({error}); return texts, numbers, lists and mappings"
        ) from error
    if len(written) > LONGEST:
        raise WrongAnswer(
            f"returned messages of {len(written):,} bytes from {method}, more than the {LONGEST:,} that are taken; cut "
            "them to what a model can read"
        )
    plain: list[dict[str, Any]] | str = json.loads(written)
    return plain


def _joined(content: Any) -> Any:
    """A content that is a list of text parts as one text; anything else as it is."""
    if not isinstance(content, list | tuple) or not content:
        return content
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content


def _reward(given: Any) -> float | None:
    if given is None:
        return None
    try:
        reward = float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongAnswer(f"returned the reward {short(given)}, expected a number or None") from error
    if isinstance(given, str | bytes | bytearray) or not abs(reward) <= FP32_MAX:  # NaN is refused too
        raise WrongAnswer(f"returned the reward {short(given)}, expected a number that fp32 holds, or None")
    return reward
