"""What a reward function gets, what it may return, and how that is checked.

The standard library only: the processes that run users' functions import this and nothing else of megarlhf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

_SHOWN = 60
"""Characters of a value in a message."""
_SHOWN_OF_ERROR = 1000
"""Characters of a user's exception in a message."""
FP32_MAX = (2 - 2**-23) * 2.0**127
"""What a column of rewards holds."""

SCORE = "score"
"""The component that is the reward, where a function names one so; otherwise the reward is the sum of all."""


class WrongValue(ValueError):
    """What a function has returned is no reward; the message says why."""


class Untold(Sequence[Any]):
    """A column of which nothing is known here, as of a response that came in a request. Reading it is an error, so that
    no function takes it for something."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, index: Any) -> Any:
        raise WrongValue(
            f"reads {self._name}, of which a request says nothing: serve functions that read texts alone, and give a "
            "run the others itself"
        )

    def __len__(self) -> int:
        return int(self[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __bool__(self) -> bool:
        return bool(self[0])


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
    ends: Sequence[str] | None = None
    """The text of the token that ended each response; "" of one that was cut. None: nobody knows."""

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, chosen: Sequence[int]) -> RewardBatch:
        """The rows `chosen`, in that order."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        told = {name: column for name, column in columns.items() if not isinstance(column, Untold | None)}
        return replace(self, **{name: [column[n] for n in chosen] for name, column in told.items()})

    def response_sizes(self) -> list[int | None]:
        """Tokens of each response; None where they are untold."""
        if isinstance(self.response_tokens, Untold):
            return [None] * len(self)
        return [len(tokens) for tokens in self.response_tokens]


@dataclass(frozen=True)
class TokenRewards:
    """Rewards of single tokens: one number for each of the response's, such as those of a process reward model."""

    values: Sequence[float]


@dataclass(frozen=True)
class RewardResult:
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
    def of(cls, returned: Any, num_tokens: int | None) -> RewardResult:
        """From what a function has returned for a response of `num_tokens` tokens; None: nobody knows.

        Raises: WrongValue for what is none of a number, None, a mapping from names to numbers (or from `score` to one,
        beside which other values are kept out), `TokenRewards`, and for what fp32 cannot hold.
        """
        if returned is None:
            return cls()
        if isinstance(returned, TokenRewards):
            values = tuple(_number(value) for value in returned.values)
            if len(values) != num_tokens:
                size = "an unknown number of" if num_tokens is None else num_tokens
                raise WrongValue(
                    f"returned TokenRewards of {len(values)} numbers for a response of {size} tokens; give one for "
                    "each of `response_tokens`"
                )
            return cls(value=_held(math.fsum(values), "TokenRewards with the sum "), token_values=values)
        if isinstance(returned, Mapping):
            if not returned:
                raise WrongValue("returned an empty mapping, expected names with numbers; return None for no reward")
            if SCORE in returned and returned[SCORE] is None:
                return cls()
            scored = SCORE in returned  # then what is no number beside it, as verl's `pred`, is for people
            named = {str(name): value for name, value in returned.items() if not scored or _is_number(value, name)}
            components = {name: _number(value, f" as {name!r}") for name, value in named.items()}
            if scored:
                return cls(value=components[SCORE], components=components)
            return cls(value=_held(math.fsum(components.values()), "numbers with the sum "), components=components)
        return cls(value=_number(returned))


def outcome_of(returned: Any, num_tokens: int | None) -> RewardResult:
    """`RewardResult.of`; what is wrong, or raised by the value itself when it is read, is said in the outcome."""
    try:
        return RewardResult.of(returned, num_tokens)
    except BaseException as error:  # noqa: BLE001 - it is said in the outcome, or raised again
        return RewardResult(error=_words(returned, error))


def outcomes_of_batch(returned: Any, batch: RewardBatch) -> list[RewardResult]:
    """From what a function has returned for a whole batch, OpenRLHF's {"rewards": ..., "extra_logs": ...} too: where
    that is no sequence of as many values, all outcomes say so; what is wrong with single values is said in theirs."""
    try:
        if isinstance(returned, Mapping) and (values := returned.get("rewards", returned.get("scores"))) is not None:
            returned = _with_logs(values, returned.get("extra_logs"), len(batch))
        if isinstance(returned, str | bytes | Mapping | set | frozenset) or not isinstance(returned, Iterable):
            raise WrongValue(f"returned {short(returned)}, expected one value for each of {len(batch)} responses")
        values = list(returned)
        if len(values) != len(batch):
            raise WrongValue(f"returned {len(values)} values for {len(batch)} responses; return one for each")
    except BaseException as error:  # noqa: BLE001 - as above
        return [RewardResult(error=_words(returned, error))] * len(batch)
    return [outcome_of(value, size) for value, size in zip(values, batch.response_sizes(), strict=True)]


def _with_logs(values: Any, logs: Any, count: int) -> Any:
    """The rewards, each with its number of every log that has one for each response."""
    columns = {}
    for name, column in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(column, Iterable) and not isinstance(column, str | bytes) and len(row := list(column)) == count:
            columns[str(name)] = row
    if not columns or not isinstance(values, Iterable) or len(rewards := list(values)) != count:
        return values
    return [{**{name: column[n] for name, column in columns.items()}, SCORE: rewards[n]} for n in range(count)]


def _words(returned: Any, error: BaseException) -> str:
    if isinstance(error, WrongValue):
        return str(error)
    if not is_users(error):
        raise error
    return f"returned {short(returned)}; reading it raised {described(error)}"


def _is_number(value: Any, name: Any) -> bool:
    """Whether a value is for the reward: the score, and whatever can be read as a number."""
    if name == SCORE:
        return True
    try:
        return not isinstance(value, str | bytes) and float(value) is not None
    except Exception:  # noqa: BLE001 - a value of any type may stand there
        return False


def _number(value: Any, where: str = "") -> float:
    if isinstance(value, str | bytes):
        raise WrongValue(f"returned {short(value)}{where}, expected a number; return a float for every response")
    try:
        number = float(value)
    except Exception as error:
        hint = "declare the function with `async def`" if hasattr(value, "__await__") else "return a float"
        raise WrongValue(f"returned {short(value)}{where}, expected a number; {hint}") from error
    if not math.isfinite(number):
        hint = "return a float, or None for no reward"
        raise WrongValue(f"returned {number}{where}, expected a finite number; {hint}")
    return _held(number)


def _held(number: float, what: str = "") -> float:
    if abs(number) > FP32_MAX:
        raise WrongValue(
            f"returned {what}{number:g}, expected a number that fp32 holds, from -{FP32_MAX:.6g} to {FP32_MAX:.6g}; "
            "scale the reward"
        )
    return number


def is_users(error: BaseException) -> bool:
    """Whether it is a failure of a user's code, such as a call of sys.exit or a cancelled task: not what a signal to
    this process raises, which is KeyboardInterrupt, or the watchdog's, which is no `Exception`."""
    if isinstance(error, Exception):
        return True
    return not isinstance(error, KeyboardInterrupt) and not type(error).__module__.startswith("megarlhf.")


def short(value: Any) -> str:
    """For a message, whatever the value's own `repr` does."""
    try:
        return cut(repr(value), _SHOWN)
    except Exception as error:  # noqa: BLE001 - a message must come about; a number of 5000 digits raises too
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def text_of(error: BaseException) -> str:
    """What it says, for a message."""
    try:
        text = str(error)
    except Exception as other:  # noqa: BLE001 - as above
        return f"(its text raises {type(other).__name__})"
    if len(text) <= _SHOWN_OF_ERROR:
        return text
    return f"{text[:_SHOWN_OF_ERROR]}... ({len(text)} characters)"


def described(error: BaseException) -> str:
    """Its kind and what it says."""
    text = text_of(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def cut(text: str, length: int) -> str:
    """With dots for what is left out."""
    return text if len(text) <= length else text[: length - 3] + "..."
