"""Flattening of arguments. torch's own pytree would take longer than the rest of a rehearsed operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors among arguments, also inside lists, tuples and dicts, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same arguments with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(each, change) for each in value)
    if isinstance(value, dict):
        return {key: with_tensors(each, change) for key, each in value.items()}
    return value
