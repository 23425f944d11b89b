"""From a row to a record: columns by their new names, an adapter, and a look at the fields that a command reads."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from megarlhf.config import SourceConfig
from megarlhf.data.json_rows import shown
from megarlhf.data.json_text import messages_in, with_lists
from megarlhf.data.sources.adapters import ADAPTERS, load_adapter, require_kept
from megarlhf.data.sources.read import Chunk
from megarlhf.data.sources.unread_columns import is_verdict

MESSAGES = "messages"
Fields = Sequence[str | Sequence[str]]
"""Names that each record must have: all of them; or, as a sequence of sequences, those of one of several forms."""


class Record(dict[str, Any]):
    """A row of the data."""

    __slots__ = ("where",)
    where: str
    """Words that say where it stands: 'data.jsonl, line 3'."""


LEFT_OUT = "left out by the adapter"
"""Begins the reason by which such rows are counted: who wrote the adapter has decided it."""


class LeftOut(Exception):
    """An adapter has returned None for the row."""


class Reader:
    """Makes records of the rows of a source."""

    def __init__(self, source: SourceConfig, fields: Fields) -> None:
        self._source, self._fields, self.adapter = source, fields, source.adapter
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
        """The row with the columns by our names. One that is read out of another (`reward_model.ground_truth`) leaves
        that one as it is, which rewards may read too."""
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
            made = self._adapter(row)
            if name in ADAPTERS and made is not None:
                require_kept(name, row, made)
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


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or of what stands in it: `reward_model.ground_truth`, `responses.0.text`. A column with
    just this name comes first. A mapping or list may also be its JSON text, as Parquet files keep it.

    Raises: KeyError, with `path`, where the row has no such column; ValueError for one in which there is nothing of
    that name.
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
            there = (
                f"has {_names(value)}" if isinstance(value, Mapping) else f"is {type(value).__name__} {shown(value)}"
            )
            raise ValueError(f"{name!r} {there}, and columns asks for {part!r} in it")
        name = f"{name}.{part}"
    return value


def records_of(chunks: Iterator[Chunk], source: SourceConfig, fields: Fields) -> Iterator[Record]:
    """Records of a source's chunks, but for rows that its adapter leaves out. Raises: ValueError as `Reader.record`."""
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
    "text": "raw texts, which `megarlhf sft` and ptx.data learn whole",
}
"""By the name of a field: the kind of data that rows with it are; the most telling first."""
_OURS = (*FORMS, "rejected", "answer", "margin", "system_prompt", "prompt_id")
"""Names that stand for nothing but themselves."""
_SHAPES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"instruction"}), "alpaca"),
    (frozenset({"query", "history"}), "alpaca"),
    (frozenset({"preferred_output"}), "openai_messages"),
    (frozenset({"messages", "rejected_response"}), "ms_swift"),
    (frozenset({"messages", "rejected_messages"}), "ms_swift"),
    (frozenset({"context", "completions"}), "nemo_rl"),
)
"""Columns that tell whose data it is, and the adapter for that."""
PAIR_ADAPTERS = ("openai_messages", "ms_swift", "nemo_rl")
"""Adapters that make preference pairs of rows without `chosen` and `rejected`."""
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
"""Names that others give to what we read, as `columns` takes them."""


def suggest_column(missing: str, row: Mapping[str, Any]) -> tuple[Literal["column", "adapter"], str] | None:
    """The column that a row may have in place of a field, one whose name is nearly right or says the same, or the
    adapter for such rows. A column that has a meaning of its own, such as `rejected`, is never taken for another
    one."""
    others = [str(name) for name in row if name not in _OURS and (missing == "answer" or _has_texts(row[name]))]
    lower = {name.lower(): name for name in others}
    named = next((lower[name] for name in _ALSO_CALLED.get(missing, ()) if name in lower), None)
    for columns, adapter in _SHAPES:
        if all(row.get(name) is not None for name in columns):
            return "adapter", adapter
    if nearest := [named] if named else difflib.get_close_matches(missing, others, n=1, cutoff=0.6):
        return None if nearest[0] in several_answers(row) else ("column", nearest[0])
    pair = [row.get(name) for name in ("chosen", "rejected")]
    if missing == "prompt" and all(isinstance(each, str) for each in pair):
        return "adapter", "anthropic_hh" if "\n\nAssistant:" in str(pair[0]) else "implicit_prompt"
    for name in (name for name in _ALSO_CALLED.get(missing, ()) if "." in name):
        with contextlib.suppress(KeyError, ValueError):
            if value_at(row, name) is not None:
                return "column", name
    return None


_ONE_OF_SEVERAL = re.compile(r"(response|answer|completion|output|reply|model)s?_?([0-9a-k])")


def several_answers(row: Mapping[str, Any]) -> list[str]:
    """Columns with an answer each, such as `response_a` and `response_b`, of which only their reader knows the better
    one; nothing where there is one alone."""
    names = [str(name) for name in row if _ONE_OF_SEVERAL.fullmatch(str(name)) and _has_texts(row[name])]
    return names if len(names) > 1 else []


def _has_texts(value: Any) -> bool:
    return value is None or isinstance(value, str | list | Mapping)


def hint(missing: str, row: Mapping[str, Any]) -> str:
    """Words on what may have been meant, or what kind of data this is, for a message."""
    if (turns := _turns_in(row)) is not None and missing in ("prompt", "response", MESSAGES):
        if messages_in(row[turns]) is not None:
            return f"; is {turns!r} the conversation? Then say columns: {{{MESSAGES}: {turns}}}"
        return f"; {turns!r} looks like a conversation of another form: make {MESSAGES!r} of it by an adapter of yours"
    if found := suggest_column(missing, row):
        kind, name = found
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
    """The column of another name that holds a conversation, of whatever form."""
    for name in _ALSO_CALLED[MESSAGES]:
        value = row.get(name)
        if messages_in(value) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            return name
    return None


def form_of(row: Mapping[str, Any]) -> str:
    """The kind of data that the row is, in words; "" where no field tells it."""
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
