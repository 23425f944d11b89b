"""Columns of a record: whether one is there, whether it is a text, and what may have been meant where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.data import json_rows
from megarlhf.data.sources.fields import hint


def present(record: Mapping[str, Any], name: str) -> bool:
    """Whether the column is there; null is not."""
    return record.get(name) is not None


def text_of(record: Mapping[str, Any], name: str) -> str:
    """Raises: ValueError where the column is missing, or no text."""
    if not present(record, name):
        raise missing(record, name)
    if not isinstance(record[name], str):
        raise ValueError(f"field {name!r} is {shown(record[name])}, expected a string; convert the data")
    return str(record[name])


def missing(record: Mapping[str, Any], name: str) -> ValueError:
    """The error, with what may have been meant."""
    if name in record:
        return ValueError(f"field {name!r} is null, expected a string; convert the data")
    return ValueError(f"no field {name!r}, found {', '.join(map(repr, record)) or 'none'}{hint(name, record)}")


def shown(value: Any) -> str:
    """A value with its type."""
    return f"{type(value).__name__} {json_rows.shown(value)}"
