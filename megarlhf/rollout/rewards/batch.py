"""Input and result of a reward function, and the checks of what it returns.

Only the standard library is imported: the processes that run users' functions load this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megarlhf.own_code.failures import describe_error, is_user_error, short
from megarlhf.rollout.environments.answer import FP32_MAX

Fields = Mapping[str, Any]
"""Columns of a record other than the prompt, such as `answer`."""

SCORE = "score"
"""Name of the component that is the reward. Without it the reward is the sum of all components."""


class WrongValue(ValueError):
    """Return value of a function that is no reward. The message says why."""


class MissingColumn(Sequence[Any]):
    """A column that is unknown, such as `messages` of a response that came in a request. Reading it raises an error, so
    that no function mistakes it for data."""

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
    """Responses to be rewarded, as columns of equal length."""

    prompts: Sequence[str]
    """The rendered prompts."""
    responses: Sequence[str]
    """Texts without the end-of-sequence token."""
    prompt_tokens: Sequence[Sequence[int]]
    response_tokens: Sequence[Sequence[int]]
    """Token ids, including the end-of-sequence token of a finished response."""
    finished: Sequence[bool]
    """Whether an end token ended the response; False: it was cut at the longest allowed length."""
    fields: Sequence[Fields]
    """All other columns of each prompt's record, such as `answer`."""
    messages: Sequence[Any]
    """Conversation that the prompt was rendered from; None for a plain text."""
    samples: Sequence[int]
    """Number of each sample in its step."""
    ends: Sequence[str] | None = None
    """Text of the token that ended each response; "" for a response that was cut. None: unknown."""
    failed: Sequence[bool] | None = None
    """Whether the environment of each conversation has failed; such samples get no reward. None: there is none."""
    turns: Sequence[Sequence[str]] | None = None
    """Text of each turn of the model in a conversation with an environment, of which the response is the last. Prompt
    and messages are then all that stands before it. None: there is no environment."""

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, chosen: Sequence[int]) -> RewardBatch:
        """The rows `chosen`, in that order."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        known = {name: column for name, column in columns.items() if not isinstance(column, MissingColumn | None)}
        return replace(self, **{name: [column[n] for n in chosen] for name, column in known.items()})

    def row_ranges(self, size: int | None) -> Iterator[range]:
        """Consecutive ranges of at most `size` rows; None: all rows in one range."""
        step = max(1, len(self) if size is None else size)
        for start in range(0, len(self), step):
            yield range(start, min(start + step, len(self)))

    def response_sizes(self) -> list[int | None]:
        """Number of tokens of each response; None where it is unknown."""
        if isinstance(self.response_tokens, MissingColumn):
            return [None] * len(self)
        return [len(tokens) for tokens in self.response_tokens]


@dataclass(frozen=True)
class TokenRewards:
    """One reward for each token of a response, such as from a process reward model."""

    values: Sequence[float]


@dataclass(frozen=True)
class RewardResult:
    """Reward of one response, or the reason why there is none."""

    value: float | None = None
    """The reward; None: it does not apply to the response."""
    components: Mapping[str, float] | None = None
    token_values: tuple[float, ...] | None = None
    """Rewards of single tokens; `value` is their sum."""
    error: str = ""
    """Message for the user if the reward failed; otherwise empty."""
    late: bool = False
    """Whether it failed because a process or a server did not answer in time. A later try may succeed."""

    @classmethod
    def of(cls, returned: Any, num_tokens: int | None) -> RewardResult:
        """Convert what a function returned for a response of `num_tokens` tokens (None: unknown).

        Valid values are a number, None, `TokenRewards`, and a mapping from names to numbers. In a mapping with `score`
        values that are no numbers are left out.

        Raises: WrongValue for anything else, and for a number that fp32 cannot hold.
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
            return cls(value=_require_fp32(math.fsum(values), "TokenRewards with the sum "), token_values=values)
        if isinstance(returned, Mapping):
            if not returned:
                raise WrongValue("returned an empty mapping, expected names with numbers; return None for no reward")
            if SCORE in returned and returned[SCORE] is None:
                return cls()
            scored = SCORE in returned  # values beside it that are no numbers, such as verl's `pred`, are left out
            named = {str(name): value for name, value in returned.items() if not scored or _is_number(value, name)}
            components = {name: _number(value, f" as {name!r}") for name, value in named.items()}
            if scored:
                return cls(value=components[SCORE], components=components)
            return cls(
                value=_require_fp32(math.fsum(components.values()), "numbers with the sum "), components=components
            )
        return cls(value=_number(returned))


class DeferredBatch:
    """A batch whose rewards are computed when they are waited for, `size` rows at a time (None: all at once)."""

    def __init__(
        self, compute: Callable[[RewardBatch], list[RewardResult]], batch: RewardBatch, size: int | None
    ) -> None:
        self._compute, self._batch, self._size = compute, batch, size
        self.done = 0
        """Number of results that are there."""

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> list[RewardResult] | None:
        """All results in the order of the batch; None if `should_stop` returned true first."""
        results: list[RewardResult] = []
        for rows in self._batch.row_ranges(self._size):
            if should_stop():
                return None
            results += self._compute(self._batch.part(rows))
            self.done = len(results)
        return results


def result_of(returned: Any, num_tokens: int | None) -> RewardResult:
    """`RewardResult.of`, with a wrong value, or an error from reading the value, as the result's error."""
    try:
        return RewardResult.of(returned, num_tokens)
    except BaseException as error:  # noqa: BLE001 - it becomes the result's error, or is raised again
        return RewardResult(error=_reading_error(returned, error))


def results_of_batch(returned: Any, batch: RewardBatch) -> list[RewardResult]:
    """Convert what a function returned for a whole batch, including OpenRLHF's {"rewards": ..., "extra_logs": ...}.

    All results have an error if that is no sequence with one value for each response. A wrong value is an error of its
    own result only.
    """
    try:
        if isinstance(returned, Mapping) and (values := returned.get("rewards", returned.get("scores"))) is not None:
            returned = _with_logs(values, returned.get("extra_logs"), len(batch))
        if isinstance(returned, str | bytes | Mapping | set | frozenset) or not isinstance(returned, Iterable):
            raise WrongValue(f"returned {short(returned)}, expected one value for each of {len(batch)} responses")
        values = list(returned)
        if len(values) != len(batch):
            raise WrongValue(f"returned {len(values)} values for {len(batch)} responses; return one for each")
    except BaseException as error:  # noqa: BLE001 - as above
        return [RewardResult(error=_reading_error(returned, error))] * len(batch)
    return [result_of(value, size) for value, size in zip(values, batch.response_sizes(), strict=True)]


def _with_logs(values: Any, logs: Any, count: int) -> Any:
    """Rewards as mappings, with the values of every log that has one for each response."""
    columns = {}
    for name, column in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(column, Iterable) and not isinstance(column, str | bytes) and len(row := list(column)) == count:
            columns[str(name)] = row
    if not columns or not isinstance(values, Iterable) or len(rewards := list(values)) != count:
        return values
    return [{**{name: column[n] for name, column in columns.items()}, SCORE: rewards[n]} for n in range(count)]


def _reading_error(returned: Any, error: BaseException) -> str:
    if isinstance(error, WrongValue):
        return str(error)
    if not is_user_error(error):
        raise error
    return f"returned {short(returned)}; reading it raised {describe_error(error)}"


def _is_number(value: Any, name: Any) -> bool:
    """Whether a component counts: the score always does, others if they can be read as a number."""
    if name == SCORE:
        return True
    try:
        return not isinstance(value, str | bytes) and float(value) is not None
    except Exception:  # noqa: BLE001 - a value of any type may be there
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
    return _require_fp32(number)


def _require_fp32(number: float, what: str = "") -> float:
    if abs(number) > FP32_MAX:
        raise WrongValue(
            f"returned {what}{number:g}, expected a number that fp32 holds, from -{FP32_MAX:.6g} to {FP32_MAX:.6g}; "
            "scale the reward"
        )
    return number
