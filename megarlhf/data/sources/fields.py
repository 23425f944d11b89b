"""Rows become records: columns are renamed, or an adapter is applied, and needed fields are checked."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megarlhf.config import SourceConfig
from megarlhf.data.json_rows import shown
from megarlhf.data.json_text import messages_in, with_lists
from megarlhf.data.sources.adapters import ADAPTERS, load_adapter, require_kept
from megarlhf.data.sources.unread_columns import is_verdict

MESSAGES = "messages"
Record = Mapping[str, Any]

LEFT_OUT = "left out by the adapter"
"""Beginning of the reason for skipped rows that the adapter's author has excluded."""


class LeftOut(Exception):
    """An adapter has returned None for the row."""


class Reader:
    """Makes records from the rows of a source."""

    def __init__(self, source: SourceConfig, fields: Sequence[str] = ()) -> None:
        """`fields`: columns that each record must have, as texts"""
        self._source, self._fields, self.adapter = source, fields, source.adapter
        self._adapter = load_adapter(source.adapter) if source.adapter is not None else None

    def record(self, row: Any, where: str) -> Record:
        """The record of a row. Raises: ValueError for a row without its columns or fields; LeftOut."""
        if not isinstance(row, Mapping):
            names = ", ".join(self._fields) or "the columns of a record"
            raise ValueError(f"{where}: expected a JSON object with {names}, got {type(row).__name__}")
        if self._adapter is not None:
            row = self._adapted(row, where)
        elif self._source.columns:
            row = self._renamed(row, where)
        for name in self._fields:
            if name not in row:
                raise ValueError(f"{where}: no field {name!r}, found {_names(row)}{hint(name, row)}")
            if not isinstance(value := row[name], str):
                got = f"{type(value).__name__} {shown(value)}"
                raise ValueError(f"{where}: field {name!r} is {got}, expected a string; convert the data")
        return row

    def _renamed(self, row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """The row with columns by our names. A column from which a value is read (`reward_model.ground_truth`) stays,
        since rewards may read it too."""
        columns = self._source.columns
        try:
            named = {ours: value_at(row, theirs) for ours, theirs in columns.items()}
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        except KeyError as missing:
            theirs = str(missing.args[0])
            ours = next(name for name, path in columns.items() if path == theirs)
            near = difflib.get_close_matches(theirs, [str(name) for name in row], n=1)
            raise ValueError(
                f"{where}: no column {theirs!r}, which columns names for {ours!r}; the columns are {_names(row)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            ) from None
        taken = set(columns.values()) | set(columns)
        return {**{key: value for key, value in row.items() if key not in taken}, **named}

    def _adapted(self, row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        name = self._source.adapter
        assert self._adapter is not None
        assert name is not None
        row = with_lists(row, row) if name in ADAPTERS else row
        try:
            record = self._adapter(row)
            if name in ADAPTERS and record is not None:
                require_kept(name, row, record)
        except ValueError as error:
            raise ValueError(f"{where}: adapter {name!r}: {error}") from error
        except Exception as error:  # code of the user's
            raise ValueError(f"{where}: adapter {name!r} failed: {type(error).__name__}: {error}") from error
        if record is None:
            raise LeftOut
        if not isinstance(record, Mapping):
            raise ValueError(
                f"{where}: adapter {name!r} returned {type(record).__name__} {shown(record)}; expected a mapping, or "
                "None for a row to leave out"
            )
        return record


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path: a column, or a part of one (`reward_model.ground_truth`, `responses.0.text`). A column with
    exactly this name comes first. A mapping or list may be its JSON text, as Parquet files keep it.

    Raises: KeyError, with `path`, where the row has no such column; ValueError where the column has no such part.
    """
    if path in row:
        return row[path]
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (column := ".".join(parts[:end])) in row:
            return _inside(row[column], column, parts[end:])
    raise KeyError(path)


def _inside(value: Any, name: str, parts: Sequence[str]) -> Any:
    """Raises: ValueError."""
    for part in parts:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError(f"{name!r} is the text {shown(value)}, in which there is no {part!r}") from None
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            has = f"has {_names(value)}" if isinstance(value, Mapping) else f"is {type(value).__name__} {shown(value)}"
            raise ValueError(f"{name!r} {has}, and columns asks for {part!r} in it")
        name = f"{name}.{part}"
    return value


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"


FORMS: Mapping[str, str] = {
    "chosen": "preference pairs, which train a reward model (`megarlhf rm`)",
    MESSAGES: "conversations: set data.template to 'chat'",
    "conversations": "conversations: set data.template to 'chat'",
    "response": "prompts with responses (`megarlhf sft`)",
    "prompt": "prompts, which `megarlhf rl` and `generate` take",
    "text": "raw texts, which `megarlhf sft` and ptx.data learn whole",
}
"""Kinds of data by a field's name, the most telling field first."""
_OURS = (*FORMS, "rejected", "answer", "margin", "system_prompt", "prompt_id")
"""Columns with a meaning of their own, which are never taken for another one."""
_SHAPES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"instruction"}), "alpaca"),
    (frozenset({"query", "history"}), "alpaca"),
    (frozenset({"preferred_output"}), "openai_messages"),
    (frozenset({"messages", "rejected_response"}), "ms_swift"),
    (frozenset({"messages", "rejected_messages"}), "ms_swift"),
    (frozenset({"context", "completions"}), "nemo_rl"),
)
"""Columns that identify another framework's rows, and the adapter for these."""
PAIR_ADAPTERS = ("openai_messages", "ms_swift", "nemo_rl")
"""Adapters that make preference pairs from rows without `chosen` and `rejected`."""
_ALSO_CALLED = {
    "prompt": ("question", "query", "instruction", "input", "inputs", "problem", "user", "context_messages"),
    "response": ("completion", "output", "answer", "solution", "target", "targets", "reply", "extra_info.answer"),
    "chosen": ("preferred", "better", "winner", "accepted", "chosen_response"),
    "rejected": ("dispreferred", "worse", "loser", "rejected_response", "not_chosen"),
    "answer": (
        "ground_truth",
        "reward_model.ground_truth",
        "label",
        "solution",
        "target",
        "gold",
        "final_answer",
        "expected_answer",
    ),
    "text": ("content", "document", "body"),
    MESSAGES: ("conversation", "dialog", "dialogue", "turns", "chat"),
}
"""Other names of our fields, in the form of `columns`."""


def suggest_column(missing: str, row: Mapping[str, Any]) -> tuple[Literal["column", "adapter"], str] | None:
    """A column that may be meant by a missing field, by a similar name or a synonym; or the adapter for such rows.
    Columns with a meaning of their own, such as `rejected`, are not suggested.

    Example: ("column", "question") for a missing "prompt".
    """
    others = [str(name) for name in row if name not in _OURS and (missing == "answer" or _has_texts(row[name]))]
    lower = {name.lower(): name for name in others}
    named = next((lower[name] for name in _ALSO_CALLED.get(missing, ()) if name in lower), None)
    for columns, adapter in _SHAPES:
        if all(row.get(name) is not None for name in columns):
            return "adapter", adapter
    if nearest := [named] if named else difflib.get_close_matches(missing, others, n=1, cutoff=0.6):
        return None if nearest[0] in several_answers(row) else ("column", nearest[0])
    pair = [row.get(name) for name in ("chosen", "rejected")]
    if missing == "prompt" and all(isinstance(answer, str) for answer in pair):
        return "adapter", "anthropic_hh" if "\n\nAssistant:" in str(pair[0]) else "implicit_prompt"
    for name in (name for name in _ALSO_CALLED.get(missing, ()) if "." in name):
        with contextlib.suppress(KeyError, ValueError):
            if value_at(row, name) is not None:
                return "column", name
    return None


_ONE_OF_SEVERAL = re.compile(r"(response|answer|completion|output|reply|model)s?_?([0-9a-k])")


def several_answers(row: Mapping[str, Any]) -> list[str]:
    """Columns with one answer each, such as `response_a` and `response_b`, if there are several. Nothing tells which
    is the better one."""
    names = [str(name) for name in row if _ONE_OF_SEVERAL.fullmatch(str(name)) and _has_texts(row[name])]
    return names if len(names) > 1 else []


def _has_texts(value: Any) -> bool:
    return value is None or isinstance(value, str | list | Mapping)


def hint(missing: str, row: Mapping[str, Any]) -> str:
    """Advice for a message on a missing field: a column, an adapter, or the kind of data."""
    if (turns := _turns_in(row)) is not None and missing in ("prompt", "response", MESSAGES):
        if messages_in(row[turns]) is not None:
            return f"; is {turns!r} the conversation? Then say columns: {{{MESSAGES}: {turns}}}"
        return f"; {turns!r} looks like a conversation of another form: make {MESSAGES!r} of it by an adapter of yours"
    if suggestion := suggest_column(missing, row):
        kind, name = suggestion
        if kind == "adapter":
            is_pair = row.get("chosen") is not None or name in PAIR_ADAPTERS
            pairs = f"{FORMS['chosen']}, " if is_pair else "those "
            return f"; these rows look like {pairs}for adapter: {name}"
        return f"; is it {name!r}? Then say columns: {{{missing}: {name}}}"
    if several := several_answers(row):
        return (
            f"; the rows have several answers each ({', '.join(several)}): say by an adapter of yours which is chosen "
            "and which rejected, or which is learnt"
        )
    if is_verdict(row.get("label")) and "text" not in row:
        return "; these rows look like unpaired preferences (KTO), of which no command learns"
    if "completions" in row and "labels" in row:
        return "; these rows look like steps with a label each (PRM), of which no command learns"
    form = form_of(row)
    if form:
        return f"; these rows look like {form}"
    return f"; name the column that is meant, as columns: {{{missing}: ...}}, or add {missing!r}"


def _turns_in(row: Mapping[str, Any]) -> str | None:
    """A column with another name that holds a conversation in any form."""
    for name in _ALSO_CALLED[MESSAGES]:
        value = row.get(name)
        if messages_in(value) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            return name
    return None


def form_of(row: Mapping[str, Any]) -> str:
    """The kind of data of a row, in words. "" where no field tells it."""
    return next((form for name, form in FORMS.items() if name in row), "")
