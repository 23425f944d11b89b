"""Calls of user code that leave this process as it was, and state that a resume point can keep."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from megarlhf.own_code.failures import describe_failure, is_user_error, short


@contextlib.contextmanager
def unchanged_process(*, gradients: bool = False) -> Iterator[None]:
    """Scope after which random generators, gradient mode and torch's default dtype are as before.

    Inside, the generators have seeds that nobody knows. So what depends on chance differs between calls and ranks, and
    is noticed.

    gradients: whether they are computed inside
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    dtype = torch.get_default_dtype()
    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    if devices is not None:
        torch.cuda.seed_all()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        torch.set_default_dtype(dtype)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def call(function: Callable[..., Any], label: str, *arguments: Any, **named: Any) -> Any:
    """Call user code in `unchanged_process`. Raises: ValueError for whatever it raises, with the user's line."""
    with unchanged_process():
        try:
            return function(*arguments, **named)
        except BaseException as error:
            if not is_user_error(error):
                raise
            raise ValueError(f"{label} {describe_failure(function, error)}") from error


def plain_state(value: Any, label: str) -> dict[str, Any]:
    """A copy of what a user's `state_dict` returned. Raises: ValueError if JSON would not give the same back."""
    try:
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state of {label} is {short(value)}, which JSON cannot hold: {error}") from error
    if not isinstance(value, Mapping) or copied != value:
        raise ValueError(
            f"the state of {label} is {short(value)}; expected a mapping of texts to numbers, texts, lists and "
            "such mappings, which JSON gives back unchanged (no tuples, no numbers as keys)"
        )
    return dict(copied)


def plain_metrics(values: Mapping[Any, Any], label: str, taken: Collection[str] = ()) -> dict[str, float | None]:
    """Metrics by name as Python's numbers. Raises: ValueError for a name that is no text or is taken, and for a value
    that is not one number."""
    plain: dict[str, float | None] = {}
    for name, value in values.items():
        number = value.item() if getattr(value, "size", None) == 1 or _is_single_tensor(value) else value
        try:
            if isinstance(number, str | bytes) or not isinstance(name, str):
                raise TypeError
            plain[name] = None if number is None else float(number)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{label} gave the metric {short(name)} as {short(value)}; expected a name and a number that fp64 holds"
            ) from None
        if name in taken:
            raise ValueError(f"{label} gave a metric {name!r}, which is there already; give it another name")
    return plain


def _is_single_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
