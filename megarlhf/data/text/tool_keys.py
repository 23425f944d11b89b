"""Keys of tool descriptions. These are JSON schemas; names of parameters in them are no keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOOKED_FOR = frozenset(("type", "function", "name", "description", "parameters", "properties", "required"))
"""Keys whose values are looked for in the rendered text, or that have no meaning by themselves."""


def keys_of_tools(value: Any) -> set[str]:
    """Keys of tool descriptions, without names of parameters and `_LOOKED_FOR`. Example: {"enum", "default"}."""
    if isinstance(value, list):
        return set().union(*map(keys_of_tools, value))
    if not isinstance(value, Mapping):
        return set()
    keys = {key for key, part in value.items() if key not in _LOOKED_FOR and part not in (None, "", [], {})}
    for key, part in value.items():
        is_parameters = key == "properties" and isinstance(part, Mapping)
        keys |= keys_of_tools(list(part.values()) if is_parameters else part)
    return keys


def without_key(value: Any, key: str) -> Any:
    """Tool descriptions without a key. Names of parameters stay."""
    if isinstance(value, list):
        return [without_key(part, key) for part in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: {parameter: without_key(described, key) for parameter, described in part.items()}
        if name == "properties" and isinstance(part, Mapping)
        else without_key(part, key)
        for name, part in value.items()
        if name != key
    }
