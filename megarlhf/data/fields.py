"""From a row to a record: columns by their new names, an adapter, and a look at the fields that a command reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from megarlhf.config import SourceConfig
from megarlhf.data.adapters import load_adapter
from megarlhf.data.formats import Chunk
from megarlhf.data.json_rows import shown

MESSAGES = "messages"
Fields = Sequence[str | Sequence[str]]
"""Names that each record must have: all of them; or, as a sequence of sequences, those of one of several forms."""


class Record(dict[str, Any]):
    """A row of the data."""

    __slots__ = ("where",)
    where: str
    """Words that say where it stands: 'data.jsonl, line 3'."""


class LeftOut(Exception):
    """An adapter has returned None for the row."""


class Reader:
    """Makes records of the rows of a source."""

    def __init__(self, source: SourceConfig, fields: Fields) -> None:
        self._source, self._fields = source, fields
        self._adapter = load_adapter(source.adapter) if source.adapter is not None else None

    def record(self, row: Any, where: str) -> Record:
        """Raises: ValueError for a row without what is read of it; LeftOut."""
        if not isinstance(row, Mapping):
            names = ", ".join(forms_of(self._fields)[0]) or "the columns of a record"
            raise ValueError(f"{where}: expected a JSON object with {names}, got {type(row).__name__}")
        if self._adapter is not None:
            row = self._adapted(row, where)
        elif self._source.columns:
            row = self._renamed(row, where)
        check_fields(row, where, self._fields)
        record = Record(row)
        record.where = where
        return record

    def _renamed(self, row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        columns = self._source.columns
        for ours, theirs in columns.items():
            if theirs not in row:
                near = difflib.get_close_matches(theirs, [str(name) for name in row], n=1)
                raise ValueError(
                    f"{where}: no column {theirs!r}, which columns names for {ours!r}; the columns are {_names(row)}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
        taken = set(columns.values()) | set(columns)
        return {**{key: value for key, value in row.items() if key not in taken},
                **{ours: row[theirs] for ours, theirs in columns.items()}}  # fmt: skip

    def _adapted(self, row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        assert self._adapter is not None
        name = self._source.adapter
        try:
            made = self._adapter(row)
        except ValueError as error:
            raise ValueError(f"{where}: adapter {name!r}: {error}") from error
        except Exception as error:  # code of the user's
            raise ValueError(f"{where}: adapter {name!r} failed: {type(error).__name__}: {error}") from error
        if made is None:
            raise LeftOut
        if not isinstance(made, Mapping):
            raise ValueError(
                f"{where}: adapter {name!r} returned {type(made).__name__} {shown(made)}; expected a mapping, or None "
                "for a row that is to be left out"
            )
        return made


def records_of(chunks: Iterator[Chunk], source: SourceConfig, fields: Fields) -> Iterator[Record]:
    """Of a source's chunks, but for rows that its adapter leaves out. Raises: ValueError as `Reader.record`."""
    reader = Reader(source, fields)
    for chunk in chunks:
        for where, row in chunk.located():
            try:
                yield reader.record(row, where)
            except LeftOut:
                continue


def forms_of(fields: Fields) -> list[tuple[str, ...]]:
    """Each form that a record may have."""
    if all(isinstance(name, str) for name in fields):
        return [tuple(str(name) for name in fields)]
    return [tuple(form) for form in fields]


def check_fields(row: Mapping[str, Any], where: str, fields: Fields) -> None:
    """Raises: ValueError, with what may have been meant, unless the row has all fields of a form, of the right type."""
    forms = forms_of(fields)
    form = next((form for form in forms if all(name in row for name in form)), None)
    if form is None:
        nearest = max(forms, key=lambda form: sum(name in row for name in form))
        missing = next(name for name in nearest if name not in row)
        others = [" and ".join(map(repr, form)) for form in forms if form is not nearest]
        either = f" (nor {', nor '.join(others)})" if others else ""
        raise ValueError(f"{where}: no field {missing!r}{either}, found {_names(row)}{hint(missing, row)}")
    for name in form:
        _check_type(row[name], name, where)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"


FORMS: Mapping[str, str] = {
    "chosen": "preference pairs, which train a reward model (`megarlhf rm`)",
    MESSAGES: "conversations: set data.template to 'chat'",
    "conversations": "conversations: set data.template to 'chat'",
    "response": "prompts with responses (`megarlhf sft`)",
    "prompt": "prompts, which `megarlhf rl` and `generate` take",
}
"""What rows with a field of this name are; the most telling first."""
_OURS = (*FORMS, "rejected", "answer", "margin")
_SHAPES: tuple[tuple[str, str], ...] = (
    ("instruction", "alpaca"),
    ("preferred_output", "openai_messages"),
)
"""A column that tells whose data it is, and the adapter for that."""
_ALSO_CALLED = {
    "prompt": ("question", "query", "instruction", "input", "problem", "user"),
    "response": ("completion", "output", "answer", "solution", "target", "reply"),
    "chosen": ("preferred", "better", "winner", "accepted", "chosen_response"),
    "rejected": ("dispreferred", "worse", "loser", "rejected_response", "not_chosen"),
    "text": ("content", "document", "body"),
    MESSAGES: ("conversation", "dialog", "dialogue", "turns", "chat"),
}
"""Names that others give to what we read."""


def meant(missing: str, row: Mapping[str, Any]) -> tuple[Literal["column", "adapter"], str] | None:
    """What a row may have in place of a field: a column whose name is nearly right or says the same, or the shape of an
    adapter. A column that has a meaning of its own, such as `rejected`, is never taken for another one."""
    others = [str(name) for name in row if name not in _OURS]
    if nearest := difflib.get_close_matches(missing, others, n=1, cutoff=0.6):
        return "column", nearest[0]
    for column, adapter in _SHAPES:
        if column in row:
            return "adapter", adapter
    lower = {name.lower(): name for name in others}
    also = [lower[name] for name in _ALSO_CALLED.get(missing, ()) if name in lower]
    return ("column", also[0]) if also else None


def hint(missing: str, row: Mapping[str, Any]) -> str:
    """What may have been meant, or what kind of data this is, for a message."""
    if found := meant(missing, row):
        kind, name = found
        if kind == "adapter":
            return f"; these rows look like those for adapter: {name}"
        return f"; is it {name!r}? Then say columns: {{{missing}: {name}}}"
    form = form_of(row)
    if form:
        return f"; these rows look like {form}"
    return f"; name the column that is meant, as columns: {{{missing}: ...}}, or add {missing!r}"


def form_of(row: Mapping[str, Any]) -> str:
    """What the row is, in words; "" where no field tells it."""
    return next((form for name, form in FORMS.items() if name in row), "")


def _check_type(value: Any, field: str, where: str) -> None:
    if field == MESSAGES:
        good = isinstance(value, list) and all(
            isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in value or [{}]
        )
        expected = "a list of {role, content} of strings, with one message at least"
    else:
        good, expected = isinstance(value, str), "a string"
    if not good:
        got = f"{type(value).__name__} {shown(value)}"
        raise ValueError(f"{where}: field {field!r} is {got}, expected {expected}; convert the data")
