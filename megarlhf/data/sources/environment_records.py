"""Records that an environment makes: `main` runs in a process of its own, perhaps of another Python.

Only the standard library is imported; `environment_source.py` asks.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megarlhf.own_code.digest import source_of
from megarlhf.own_code.failures import describe_error, describe_failure, is_user_error, short
from megarlhf.own_code.gymnasium import SEED_COLUMN, observation_of_reset, reset_keywords, why_refused
from megarlhf.own_code.interpreter import answer_request
from megarlhf.own_code.load import load_function

_EXPECTED = (
    "a class with a method prompts(size, seed), which returns records, or gymnasium's reset(*, seed, options), whose "
    "observations become prompts"
)


def main() -> None:
    """Answer a request of `environment_source.py`."""
    answer_request(_answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    make = load_function(request["function"], "environment")
    label, args = f"environment {request['function']!r}", request["args"]
    _check(make, args, label)
    if request["look"]:
        return source_of(request["function"], "environment")._asdict()
    records = _records(make, args, request["size"], request["seed"], label)
    return {"records": [_plain(record, number, label) for number, record in enumerate(records)]}


def _check(make: Callable[..., Any], args: Mapping[str, Any], label: str) -> None:
    """Check what can be known before anything is called. Raises: ValueError."""
    if not _is_made_without_object(make, args) and (why := why_refused(make, (), args)):
        given = ", ".join(args) or "none"
        raise ValueError(
            f"{label} cannot be made with the parameters that are given ({given}): {why}; change those behind the ? "
            "of the source (size, seed and python are no arguments of the class)"
        )
    if not inspect.isclass(make):
        return  # a function, whose environment is looked at when it is made
    for name, parameters in (("prompts", ("size", "seed")), ("reset", ())):
        if callable(method := getattr(make, name, None)):
            keywords = {} if parameters else dict.fromkeys(reset_keywords(method))
            is_static = isinstance(inspect.getattr_static(make, name), staticmethod | classmethod)
            if why := why_refused(method, parameters if is_static else ("self", *parameters), keywords):
                call = f"{name}({', '.join([*parameters, *(f'{key}=...' for key in keywords)])})"
                raise ValueError(f"{label}: its method {name} is called as {call}, which it does not take: {why}")
            if name == "reset" and "seed" not in keywords:
                raise ValueError(f"{label}: its reset takes no seed, so that its prompts cannot differ; {_expected()}")
            return
    raise ValueError(f"{label} makes no prompts; {_expected()}")


def _expected() -> str:
    return f"expected {_EXPECTED}"


def _is_made_without_object(make: Any, args: Mapping[str, Any]) -> bool:
    """Whether `prompts` is called on the class: it needs no object, and no parameters are given."""
    static = inspect.getattr_static(make, "prompts", None) if inspect.isclass(make) else None
    return not args and isinstance(static, staticmethod | classmethod)


def _records(make: Callable[..., Any], args: Mapping[str, Any], size: int, seed: int, label: str) -> list[Any]:
    """The records. Raises: ValueError with the user's line, and for another number of records."""
    owner: Any = make if _is_made_without_object(make, args) else _made(make, args, seed, label)
    if not callable(getattr(owner, "prompts", None)):
        if "seed" not in reset_keywords(getattr(owner, "reset", None)):
            raise ValueError(f"{label} makes no prompts; {_expected()}")
        rest = range(seed + 1, seed + size)
        return [_observed(owner, seed, label), *(_observed(_made(make, args, n, label), n, label) for n in rest)]
    returned = _called(label, owner.prompts, size, seed)
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        raise ValueError(f"{label} returned {short(returned)} from prompts, expected a list of {size} records")
    records = _called(label, lambda: list(itertools.islice(returned, size + 1)))
    if len(records) != size:
        got = f"more than {size}" if len(records) > size else f"{len(records)}"
        raise ValueError(f"{label} returned {got} records from prompts(size={size}, seed={seed}), expected {size}")
    return list(records)


def _made(make: Callable[..., Any], args: Mapping[str, Any], seed: int, label: str) -> Any:
    """A new object, with random numbers of the process that follow from the seed, as some environments draw them."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed % 2**32)
    return _called(label, make, **args)


def _observed(environment: Any, seed: int, label: str) -> dict[str, Any]:
    """The record of an environment that is reset with a seed. Each has an object of its own, as conversations have."""
    returned = _called(label, environment.reset, seed=seed)
    try:
        observation = observation_of_reset(returned)
    except ValueError as error:
        raise ValueError(f"{label} {error}") from None
    if callable(close := getattr(environment, "close", None)):
        _called(label, close)
    return {"prompt": observation, SEED_COLUMN: seed}


def _called(label: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Result of user code, sync or async. Raises: ValueError with the user's line."""
    try:
        returned = function(*args, **named)
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
    except BaseException as error:
        if not is_user_error(error):
            raise
        raise ValueError(f"{label} {describe_failure(function, error)}") from error


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _plain(record: Any, number: int, label: str) -> dict[str, Any]:
    """A record as JSON values. Raises: ValueError for what is none."""
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{label} returned {short(record)} as record {number} from prompts, expected a mapping with prompt or "
            "messages"
        )
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(record), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{label} returned record {number}, which JSON cannot hold ({describe_error(error)}): {short(record)}"
        ) from error
    return plain


if __name__ == "__main__":
    main()
