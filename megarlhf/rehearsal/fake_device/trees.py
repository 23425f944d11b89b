"""Flattening of arguments. torch's own pytree would take longer than the rest of a rehearsed operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors among arguments, also inside lists, tuples and dicts, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value.values())
    return tensors


def with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same arguments, each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {key: with_tensors(part, change) for key, part in value.items()}
    return value
