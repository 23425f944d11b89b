"""Records from files: JSON lines, JSON, Parquet, Arrow, directories of these, saved datasets, hub names.

JSON is parsed here, everything else through Hugging Face `datasets`. JSON is not, because `datasets` turns
strings that look like dates into datetimes, fills a misspelt field with nulls, and reports a broken line
without its number. What `datasets` has to cache goes to a temporary directory of this process, which is
removed on return: ranks that load the same file share nothing, so they cannot race.
"""

from __future__ import annotations

import codecs
import difflib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_DATASETS_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON_SUFFIXES, *_DATASETS_BUILDERS)
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FRAGMENT = 80

_Located = Iterator[tuple[str, Any]]
"""A row, with the words that say where it stands: 'data.jsonl, line 3'."""


def load_records(
    path: str | Path | Sequence[str | Path],
    *,
    fields: Sequence[str],
    optional: Sequence[str] = (),
    split: str = "train",
) -> list[Record]:
    """Every row as a dict, all columns kept, in the order of the files.

    path:     a file, a directory of files (by name), a directory of `save_to_disk`, or a list of these,
              joined; what is not on disk and looks like `owner/name` is loaded from the Hugging Face hub
    fields:   must stand in every row: non-null strings, but for `messages`, a list of {role, content}
    optional: must be strings where they stand
    split:    of a hub dataset or a saved DatasetDict; files have none
    Raises:   ValueError that names file, line or row, what was found and what was expected
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    records: list[Record] = []
    for one in paths:
        records.extend(_checked(row, where, fields, optional) for where, row in _read(str(one), split))
    if not records:
        raise ValueError(f"no rows in {', '.join(map(str, paths)) or 'an empty list of paths'}; give data")
    return records


def require_path(path: str | Path) -> None:
    """Raises ValueError, naming the nearest neighbour, unless `path` is on disk or may be a hub name."""
    found = Path(path).expanduser()
    if not found.exists() and not _is_hub_name(str(path)):
        raise ValueError(_missing(found))


def _read(name: str, split: str) -> _Located:
    require_path(name)
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _read_directory(path, split)
    elif path.exists():
        yield from _read_file(path)
    else:
        yield from _read_hub(name, split)


def _is_hub_name(name: str) -> bool:
    """`data/trian` beside a directory `data` is a misspelt path and must not go to the network."""
    first = name.split("/")[0]
    return bool(_HUB_NAME.fullmatch(name)) and not name.endswith(_SUFFIXES) and not Path(first).exists()


def _missing(path: Path) -> str:
    parent = path.parent
    while not parent.exists():
        path, parent = parent, parent.parent
    siblings = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.0)
    hint = f"; the nearest name beside it is {parent / nearest[0]}" if nearest else f"; {parent} is empty"
    return f"no such data file or directory: {path}{hint}"


def _read_directory(directory: Path, split: str) -> _Located:
    if (directory / "state.json").exists() or (directory / "dataset_dict.json").exists():
        yield from _read_saved(directory, split)
        return
    entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix in _SUFFIXES]
    if not files:
        found = ", ".join(entry.name for entry in entries[:8]) or "nothing"
        raise ValueError(
            f"no data files in {directory}: found {found}; expected names that end in "
            f"{', '.join(_SUFFIXES)}, or a directory written by datasets' save_to_disk"
        )
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> _Located:
    if path.suffix in _JSON_SUFFIXES:
        yield from _read_json(path)
        return
    builder = _DATASETS_BUILDERS.get(path.suffix)
    if builder is None:
        raise ValueError(f"{path}: cannot tell its format; expected a name that ends in {', '.join(_SUFFIXES)}")
    from datasets import load_dataset

    with tempfile.TemporaryDirectory(prefix="megarlhf-data-") as cache:
        try:
            rows = load_dataset(builder, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # datasets wraps every reader's own error
            cause = error.__cause__ or error
            raise ValueError(f"{path}: not a readable {path.suffix} file: {cause}; write it again") from error
        yield from _rows(rows, str(path))


def _read_saved(directory: Path, split: str) -> _Located:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(directory))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise ValueError(f"{directory} has no split {split!r}; it has {', '.join(saved)}")
        saved = saved[split]
    yield from _rows(saved, str(directory))


def _read_hub(name: str, split: str) -> _Located:
    from datasets import load_dataset

    with tempfile.TemporaryDirectory(prefix="megarlhf-data-") as cache:
        try:
            rows = load_dataset(name, split=split, cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # network, name, split, permission: one message for all
            raise ValueError(
                f"{name} is not on disk, and loading it from the Hugging Face hub (split {split!r}) failed: "
                f"{type(error).__name__}: {error}; check the name, or download it where there is a network"
            ) from error
        yield from _rows(rows, f"{name}[{split}]")


def _rows(rows: Any, name: str) -> _Located:
    for number, row in enumerate(rows, start=1):
        yield f"{name}, row {number}", dict(row)


def _read_json(path: Path) -> _Located:
    """JSON lines, or one JSON array of objects; the first character says which, not the file's name."""
    with path.open("rb") as stream:
        is_array = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        stream.seek(0)
        if is_array:
            rows = _parse(stream.read(), path, 1)
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
            return
        # Bytes are split at line feeds only; a str also at U+2028, which a JSON string may hold.
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{path}, line {number}", _parse(line, path, number)


def _parse(raw: bytes, path: Path, first_line: int) -> Any:
    try:
        text = raw.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file") from error
    text = text.rstrip()  # or a value that is cut off at the end would be reported on the line after it
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        fragment = text[max(error.pos - _FRAGMENT // 2, 0) : error.pos + _FRAGMENT // 2].strip()
        raise ValueError(
            f"{path}, line {first_line + error.lineno - 1}: malformed JSON ({error.msg}, column "
            f"{error.colno}) near {fragment!r}; expected one JSON object a line"
        ) from error


def _checked(row: Any, where: str, fields: Sequence[str], optional: Sequence[str]) -> Record:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object with {', '.join(fields)}, got {type(row).__name__}")
    for field in fields:
        if field not in row:
            nearest = difflib.get_close_matches(field, list(row), n=1, cutoff=0.0)
            hint = f"; the nearest is {nearest[0]!r}: rename it" if nearest else "; the row is empty"
            raise ValueError(f"{where}: no field {field!r}, found {', '.join(map(repr, row)) or 'none'}{hint}")
        _check_type(row[field], field, where)
    for field in optional:
        if row.get(field) is not None:
            _check_type(row[field], field, where)
    return dict(row)


def _check_type(value: Any, field: str, where: str) -> None:
    if field == "messages":
        good = isinstance(value, list) and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
        expected = "a list of {role, content} of strings"
    else:
        good, expected = isinstance(value, str), "a string"
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= _FRAGMENT else shown[:_FRAGMENT] + "..."
        raise ValueError(
            f"{where}: field {field!r} is {type(value).__name__} {shown}, expected {expected}; convert the data"
        )
