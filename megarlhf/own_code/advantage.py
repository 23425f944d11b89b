"""Declaration of an advantage: what it reads and writes, and what the run must prepare for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from megarlhf.own_code.load import load

READS = ("values", "old_logprobs", "ref_logprobs", "greedy_rewards")
"""Columns that an advantage may declare; rewards, groups and lengths are always there. `values` builds a critic,
`ref_logprobs` a reference, `greedy_rewards` draws a greedy response to each prompt."""
WRITES = ("advantages", "returns")


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """An advantage estimator: its function, and what the run must know about it."""

    compute: Callable[[Any], Any]
    """Function from the step's samples (`AdvantageInputs`) to a tensor or a mapping of columns."""
    reads: tuple[str, ...] = ()
    """Columns that it needs, of `READS`."""
    writes: tuple[str, ...] = ("advantages",)
    """Columns that it makes: `advantages`, and with a critic also `returns`, which the critic learns."""
    compares_groups: bool = False
    """Whether it compares the responses to one prompt, so that a prompt needs several."""
    whitens: bool = False
    """Whether its advantages are whitened where `algo.whiten_advantages` is not set."""
    discounts: bool = False
    """Whether it reads `algo.gamma`."""

    def __post_init__(self) -> None:
        for word, columns, known in (("reads", self.reads, READS), ("writes", self.writes, WRITES)):
            if not isinstance(columns, tuple) or not set(columns) <= set(known):
                raise ValueError(f"an advantage declares {word} = {columns!r}; expected a tuple of {', '.join(known)}")
        if "advantages" not in self.writes:
            raise ValueError(f"an advantage declares writes = {self.writes!r}, without 'advantages'; add it")
        if ("values" in self.reads) != ("returns" in self.writes):
            raise ValueError(
                f"an advantage declares reads = {self.reads!r} and writes = {self.writes!r}; one that reads 'values' "
                "has a critic, which learns the column 'returns': declare both or none"
            )

    def __call__(self, inputs: Any) -> Any:
        return self.compute(inputs)


@overload
def advantage(function: Callable[[Any], Any], /) -> Advantage: ...
@overload
def advantage(
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = ("advantages",),
    compares_groups: bool = False,
    whitens: bool = False,
) -> Callable[[Callable[[Any], Any]], Advantage]: ...
def advantage(function: Callable[[Any], Any] | None = None, /, **declared: Any) -> Any:
    """Decorator that makes an advantage of a function; see `Advantage` for what it declares.

    Example:

        @megarlhf.advantage
        def above_the_mean(step):
            return step.rewards_N - step.rewards_N.mean()
    """
    if function is not None:
        return Advantage(compute=function)
    if unknown := sorted(declared.keys() - {"reads", "writes", "compares_groups", "whitens"}):
        raise ValueError(
            f"an advantage declares {', '.join(unknown)}; expected some of reads, writes, compares_groups and whitens"
        )
    return lambda function: Advantage(compute=function, **declared)


def load_advantage(path: str) -> Advantage:
    """The advantage that `package.module:name` names: one made by `advantage`, or a function of one parameter.

    Raises: ValueError for anything else.
    """
    what = "advantage"
    value = load(path, what)
    if isinstance(value, Advantage):
        function = value.compute
    elif callable(value) and not inspect.isclass(value):
        function, value = value, Advantage(compute=value)
    else:
        raise ValueError(
            f"{what} {path!r} is a {type(value).__name__}, expected a function with @megarlhf.advantage; name one"
        )
    require_parameters(function, ("step",), f"{what} {path!r}")
    return value


def require_parameters(function: Callable[..., Any], names: tuple[str, ...], label: str) -> None:
    """Raises: ValueError for a function that cannot be called with so many positional arguments, or that is async."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{label} is an async function, whose result nobody waits for; write it with def")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # a function of C code, which does not say
    own = list(signature.parameters)
    swapped = any(name in own[: len(names)] and own.index(name) != place for place, name in enumerate(names))
    try:
        signature.bind(*names)
    except TypeError:
        swapped = True
    if swapped:
        raise ValueError(
            f"{label} has the parameters {signature}, and is called with ({', '.join(names)}); give it these, in this "
            "order"
        )
