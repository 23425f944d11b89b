"""Messages as Parquet and CSV files keep them: as JSON text, or as an object with one list per key.

'[{"role": "user", "content": "hi"}]'      {"role": ["user"], "content": ["hi"]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megarlhf.data.json_rows import object_of

_BEGINS_A_LIST = re.compile(r"\ufeff?\s*\[\s*\{")
_KEYS_OF_MESSAGES = ({"role", "content"}, {"from", "value"}, {"role", "tool_calls"})


def parse_text(text: str) -> Any:
    """Parse a JSON text. Raises: ValueError, also for a key that occurs twice in an object."""
    return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=object_of)


def messages_in(value: Any) -> list[Mapping[str, Any]] | None:
    """Messages from a list, from its JSON text, or from an object of lists. None for anything else."""
    if isinstance(value, str):
        if not _BEGINS_A_LIST.match(value):
            return None
        try:
            value = parse_text(value)
        except ValueError:
            return None
    if isinstance(value, Mapping):
        value = _as_rows(value)
    if not isinstance(value, list) or not value:
        return None
    good = all(
        isinstance(message, Mapping) and any(keys <= message.keys() for keys in _KEYS_OF_MESSAGES) for message in value
    )
    return value if good else None


def _as_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn an object of lists, which `datasets` makes of a `Sequence` of objects, into a list of objects."""
    lists = list(columns.values())
    if not lists or not all(isinstance(values, list) and len(values) == len(lists[0]) for values in lists):
        return []
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True))
    return [{key: part for key, part in row.items() if part is not None} for row in rows]


def with_lists(record: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The record with lists of messages in the named columns, where these hold messages in another form."""
    texts = ((name, messages_in(record[name])) for name in names if isinstance(record.get(name), str | Mapping))
    lists = {name: messages for name, messages in texts if messages is not None}
    return {**record, **lists} if lists else record
