"""Columns of a record: whether one is there, whether it is a text, and what may have been meant where it is not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_FORMS = {
    "chosen": "preference pairs, which train a reward model (`megarlhf rm`)",
    "messages": "conversations (data.template: chat)",
    "conversations": "conversations (data.template: chat)",
    "response": "prompts with responses (`megarlhf sft`)",
    "prompt": "prompts, which `megarlhf rl` and `generate` take",
}
"""What records with a column of this name are; the most telling first."""
_SHOWN = 80


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
    """The error, with a column whose name is nearly right, or with what such records are read by."""
    if name in record:
        return ValueError(f"field {name!r} is null, expected a string; convert the data")
    others = [column for column in record if column not in (*_FORMS, "rejected", "answer")]
    if nearest := difflib.get_close_matches(name, others, n=1, cutoff=0.6):
        hint = f"is it {nearest[0]!r}? Then rename it (data.columns)"
    elif form := next((form for column, form in _FORMS.items() if column in record), ""):
        hint = f"these rows look like {form}"
    else:
        hint = f"rename the one that is meant (data.columns), or add {name!r}"
    return ValueError(f"no field {name!r}, found {', '.join(map(repr, record)) or 'none'}; {hint}")


def shown(value: Any) -> str:
    """A value with its type."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
