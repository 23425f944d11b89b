"""Calls of user code by its signature, and what gymnasium's `reset` returns. Only the standard library is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarlhf.own_code.failures import short

SEED_COLUMN = "environment_seed"
"""Column of a record with the seed from which an environment has made its prompt."""


def why_refused(function: Callable[..., Any], positional: Sequence[str], named: Mapping[str, Any]) -> str:
    """Reason why a call with these arguments would fail; empty if it would not, or nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, say
        return ""
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        return str(error)
    return ""


def reset_keywords(reset: Any) -> tuple[str, ...]:
    """Keywords of gymnasium's `reset(*, seed=None, options=None)` that a method takes, by its signature."""
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # written in C, say
        return ("seed", "options")
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return tuple(name for name in ("seed", "options") if takes_all or name in names)


def observation_of_reset(returned: Any) -> str:
    """The observation in what `reset` returned. Raises: ValueError unless that is a text and an info."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(
            f"returned {short_values(returned)} from reset, expected two values: observation, info; older environments "
            "return the observation alone: write a class around it"
        )
    return text_of(returned[0], "reset")


def text_of(observation: Any, method: str) -> str:
    """An observation, checked. Raises: ValueError unless it is a text."""
    if not isinstance(observation, str):
        raise ValueError(
            f"returned the observation {short(observation)} from {method}, expected a text; write it as one, such as "
            "in a class around the environment"
        )
    return str(observation)


def short_values(returned: Any) -> str:
    """Words for what a method returned, with the number of values."""
    return f"{len(returned)} values {short(returned)}" if isinstance(returned, tuple | list) else short(returned)
