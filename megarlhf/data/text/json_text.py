"""Values that a column keeps as JSON text, as files of Parquet and CSV do: messages above all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megarlhf.data.json_rows import object_of

_BEGINS_A_LIST = re.compile(r"\s*\[\s*\{")
_KEYS_OF_MESSAGES = ({"role", "content"}, {"from", "value"}, {"role", "tool_calls"})


def parse_text(text: str) -> Any:
    """The value of a JSON text. Raises: ValueError, also for a key that stands twice in an object."""
    return json.loads(text, object_pairs_hook=object_of)


def messages_in(value: Any) -> list[Mapping[str, Any]] | None:
    """The messages of a list, or of the JSON text of one; None for anything else."""
    if isinstance(value, str):
        if not _BEGINS_A_LIST.match(value):
            return None
        try:
            value = parse_text(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value:
        return None
    good = all(isinstance(each, Mapping) and any(keys <= each.keys() for keys in _KEYS_OF_MESSAGES) for each in value)
    return value if good else None


def with_lists(record: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The record, with messages in place of their JSON text in columns of these names."""
    texts = ((name, messages_in(record[name])) for name in names if isinstance(record.get(name), str))
    lists = {name: messages for name, messages in texts if messages is not None}
    return {**record, **lists} if lists else record
