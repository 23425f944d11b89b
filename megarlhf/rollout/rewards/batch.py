"""What a reward function gets, what it may return, and how that is checked.

The standard library only: the processes that run users' functions import this and nothing else of megarlhf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

_SHOWN = 60
"""Characters of a value in a message."""

SCORE = "score"
"""The component that is the reward, where a function names one so; otherwise the reward is the sum of all."""


@dataclass(frozen=True)
class RewardBatch:
    """Responses to be rewarded, by columns of equal length."""

    prompts: Sequence[str]
    """The rendered prompts."""
    responses: Sequence[str]
    """Without the end-of-sequence token."""
    prompt_tokens: Sequence[Sequence[int]]
    response_tokens: Sequence[Sequence[int]]
    """With the end-of-sequence token, where there is one."""
    finished: Sequence[bool]
    """Ended by an end token; False: cut at the longest length that is allowed."""
    fields: Sequence[Mapping[str, Any]]
    """All other columns of each prompt's record, such as `answer`."""
    messages: Sequence[Any]
    """The conversation that the prompt was rendered from; None where it was a plain text."""
    samples: Sequence[int]
    """Each one's number in its step."""

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, chosen: Sequence[int]) -> RewardBatch:
        """The rows `chosen`, in that order."""
        columns = {field.name: [getattr(self, field.name)[n] for n in chosen] for field in fields(self)}
        return replace(self, **columns)


@dataclass(frozen=True)
class TokenRewards:
    """Rewards of single tokens: one number for each of the response's, such as those of a process reward model."""

    values: Sequence[float]


@dataclass(frozen=True)
class Outcome:
    """What a function said of one response."""

    value: float | None = None
    """None: it does not apply."""
    components: Mapping[str, float] | None = None
    token_values: tuple[float, ...] | None = None
    """Of which `value` is the sum."""
    error: str = ""
    """Why there is no value, in words for the user; empty: nothing has failed."""
    late: bool = False
    """It failed because a process or a server did not answer in time: another try later may go well."""

    @classmethod
    def of(cls, returned: Any, num_tokens: int) -> Outcome:
        """From what a function has returned for a response of `num_tokens` tokens.

        Raises: ValueError for what is none of a number, None, a mapping from names to numbers, `TokenRewards`.
        """
        if returned is None:
            return cls()
        if isinstance(returned, TokenRewards):
            values = tuple(_number(value) for value in returned.values)
            if len(values) != num_tokens:
                raise ValueError(
                    f"returned TokenRewards of {len(values)} numbers for a response of {num_tokens} tokens; give one "
                    "for each of `response_tokens`"
                )
            return cls(value=math.fsum(values), token_values=values)
        if isinstance(returned, Mapping):
            if not returned:
                raise ValueError("returned an empty mapping, expected names with numbers; return None for no reward")
            components = {str(name): _number(value) for name, value in returned.items()}
            value = components[SCORE] if SCORE in components else math.fsum(components.values())
            return cls(value=value, components=components)
        return cls(value=_number(returned))


def outcomes_of_batch(returned: Any, batch: RewardBatch) -> list[Outcome]:
    """From what a function has returned for a whole batch.

    Raises: ValueError when that is no sequence of as many values; what single values are said to be wrong is in their
    outcomes.
    """
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        raise ValueError(f"returned {short(returned)}, expected one value for each of {len(batch)} responses")
    values = list(returned)
    if len(values) != len(batch):
        raise ValueError(f"returned {len(values)} values for {len(batch)} responses; return one for each")
    found = []
    for value, tokens in zip(values, batch.response_tokens, strict=True):
        try:
            found.append(Outcome.of(value, len(tokens)))
        except ValueError as error:
            found.append(Outcome(error=str(error)))
    return found


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError(f"returned {short(value)}, expected a number; return a float for every response")
    try:
        number = float(value)
    except Exception as error:
        hint = "declare the function with `async def`" if hasattr(value, "__await__") else "return a float"
        raise ValueError(f"returned {short(value)}, expected a number; {hint}") from error
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, expected a finite number; return a float, or None for no reward")
    return number


def short(value: Any) -> str:
    """For a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
