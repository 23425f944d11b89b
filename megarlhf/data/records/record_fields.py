"""Columns of a record: present or not, text or not, and suggestions for a missing one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.data import json_rows
from megarlhf.data.sources.fields import hint


def present(record: Mapping[str, Any], name: str) -> bool:
    """Tell whether the record has the column, and not as null."""
    return record.get(name) is not None


def required_text(record: Mapping[str, Any], name: str) -> str:
    """The text of a column. Raises: ValueError where the column is missing, or no text."""
    if not present(record, name):
        raise missing(record, name)
    if not isinstance(record[name], str):
        raise ValueError(f"field {name!r} is {describe_value(record[name])}, expected a string; convert the data")
    return str(record[name])


def missing(record: Mapping[str, Any], name: str) -> ValueError:
    """The error for a missing column, with a suggestion."""
    if name in record:
        return ValueError(f"field {name!r} is null, expected a string; convert the data")
    return ValueError(f"no field {name!r}, found {', '.join(map(repr, record)) or 'none'}{hint(name, record)}")


def describe_value(value: Any) -> str:
    """A value with its type, for a message."""
    return f"{type(value).__name__} {json_rows.shown(value)}"
