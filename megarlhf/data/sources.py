"""Records from files: JSON lines, JSON, Parquet, Arrow, directories of these, saved datasets, hub names, generators.

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

from megarlhf.data.procedural import generate, is_procedural, require_task


class Record(dict[str, Any]):
    """A row of the data."""

    __slots__ = ("where",)
    where: str
    """Words that say where it stands: 'data.jsonl, line 3'."""


_DATASETS_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON_SUFFIXES, *_DATASETS_BUILDERS)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "dev": "validation", "val": "validation",
    "heldout": "heldout", "held_out": "heldout", "held-out": "heldout", "holdout": "heldout",
    "test": "test", "testing": "test", "eval": "test", "evals": "test", "evaluation": "test",
}  # fmt: skip
"""Words in a file's name, in either case, that make it a split: those of `datasets`, and ours for held-out data."""
_SPLIT_WORD = re.compile(rf"(?:^|(?<=[-._ 0-9]))({'|'.join(_SPLIT_WORDS)})(?=[-._ 0-9])")
_MAY_BE_A_SPLIT = re.compile(r"train|test|valid|dev|eval|hold[-_]?out|held[-_]?out")
"""Where one of these is only a part of a word (`mathtrain`, `contest`), nobody can say whether it means a split."""
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FRAGMENT = 80

_Located = Iterator[tuple[str, Any]]
"""A row, with the words that say where it stands."""


def load_records(path: str | Path, *, fields: Sequence[str], split: str | None = None) -> list[Record]:
    """Every row as a dict, all columns kept, in the order of the files.

    path:     a file, a directory of files (by name), or a directory of `save_to_disk`; what is not on disk and looks
              like `owner/name` is loaded from the Hugging Face hub; `reasoning_gym:TASK?size=500&seed=0` is generated
    fields:   must stand in every row: non-null strings, but for `messages`, a list of {role, content}, not empty
    split:    of a directory of files named for splits, a saved DatasetDict or a hub dataset; None: it has one only
    Raises:   ValueError that names file, line or row, what was found and what was expected, or the splits of a source
              that has several
    """
    records = [_checked(row, where, fields) for where, row in _read(str(path), split)]
    if not records:
        raise ValueError(f"no rows in {path}; give data")
    return records


def require_source(path: str | Path, split: str | None = None) -> None:
    """Raises ValueError, naming the nearest neighbour, unless `path` is on disk or may be a hub name; and, where what
    is on disk has several splits, unless `split` is one of them. No data is read."""
    source = Path(path)
    if is_procedural(path):
        if split is not None:
            raise ValueError(f"{path} is generated and has no split {split!r}; leave the split out")
        require_task(str(path))
        return
    if not source.exists() and not _is_hub_name(str(path)):
        raise ValueError(_missing(source))
    if source.is_dir():
        _chosen(str(source), list(_saved_splits(source) or _files_by_split(source)), split)
    elif source.exists() and split is not None:
        raise ValueError(f"{source} is one file and has no split {split!r}; leave the split out")


def source_files(path: str | Path, split: str | None = None) -> set[Path]:
    """What is read of a source on disk: its files, or the directory of a saved dataset, without links and `..`. Empty
    for a hub name and for what is generated. Raises: ValueError as `require_source`."""
    require_source(path, split)
    source = Path(path)
    if not source.is_dir():
        return {source.resolve()} if source.exists() else set()
    if saved := _saved_splits(source):
        return {(source / _chosen(str(source), saved, split)).resolve()}
    by_split = _files_by_split(source)
    return {file.resolve() for file in by_split[_chosen(str(source), list(by_split), split)]}


def source_words(path: str | Path, split: str | None) -> str:
    """A source in a message: two splits of one directory are told apart."""
    return str(path) if split is None else f"{path}, split {split}"


def _chosen(name: str, splits: Sequence[str], split: str | None) -> str:
    """The split to read. Raises: ValueError that lists what there is."""
    listed = ", ".join(shown or "(no split named)" for shown in splits)
    if split is None:
        if len(splits) > 1:
            raise ValueError(
                f"{name} has several splits, of which only one is meant: {listed}; name it (data.train_split, "
                "data.validation_split), or give the path of the split's own file or directory"
            )
        return splits[0]
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {listed}")
    return split


def _read(name: str, split: str | None) -> _Located:
    require_source(name, split)
    path = Path(name)
    if is_procedural(name):
        yield from ((f"{name}, item {number}", row) for number, row in enumerate(generate(name)))
    elif path.is_dir():
        yield from _read_directory(path, split)
    elif path.exists():
        yield from _read_file(path)
    else:
        yield from _read_hub(name, split)


def _is_hub_name(name: str) -> bool:
    """`data/trian` beside a directory `data` is a misspelt path and must not go to the network."""
    first = name.split("/")[0]
    return bool(_HUB_NAME.fullmatch(name)) and not name.lower().endswith(_SUFFIXES) and not Path(first).exists()


def _missing(path: Path) -> str:
    parent = path.parent
    while not parent.exists():
        path, parent = parent, parent.parent
    siblings = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.0)
    hint = f"; the nearest name beside it is {parent / nearest[0]}" if nearest else f"; {parent} is empty"
    return f"no such data file or directory: {path}{hint}"


def _read_directory(directory: Path, split: str | None) -> _Located:
    if saved := _saved_splits(directory):
        from datasets import load_from_disk

        within = directory / _chosen(str(directory), saved, split) if saved != [""] else directory
        yield from _rows(load_from_disk(str(within)), str(within))
        return
    by_split = _files_by_split(directory)
    forms: dict[str, str] = {}
    for file in by_split[_chosen(str(directory), list(by_split), split)]:
        for number, (where, row) in enumerate(_read_file(file)):
            if number == 0 and isinstance(row, Mapping):
                forms.setdefault(_form(row), file.name)
                if len(forms) > 1:
                    listed = "; ".join(
                        f"{name} looks like {form or 'none that is known'}" for form, name in forms.items()
                    )
                    raise ValueError(
                        f"{directory} mixes different kinds of data, which are not joined: {listed}. Give the path of "
                        "the one file that is meant, or of a directory with files of one kind"
                    )
            yield where, row


def files_in_words(path: str | Path, split: str | None) -> str:
    """Which files of a directory are read and which entries are not, and why, for a note; empty for other sources."""
    directory = Path(path)
    if not directory.is_dir() or _saved_splits(directory):
        return ""
    by_split = _files_by_split(directory)
    files = by_split[_chosen(str(directory), list(by_split), split)]
    entries = sorted(set(directory.iterdir()) - {file for files in by_split.values() for file in files})
    others = [entry.name + "/" * entry.is_dir() for entry in entries if not entry.name.startswith(".")]
    words = f"; read {len(files)} file{'s' * (len(files) > 1)}: {_listed([file.name for file in files])}"
    return words + (f"; passed over, as folders and other kinds of files are: {_listed(others)}" if others else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _saved_splits(directory: Path) -> list[str]:
    """The splits of what `save_to_disk` wrote; one without a name for a Dataset, none for any other directory."""
    if (directory / "dataset_dict.json").exists():
        return list(json.loads((directory / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
    return [""] if (directory / "state.json").exists() else []


def _files_by_split(directory: Path) -> dict[str, list[Path]]:
    """The data files of a directory, in order, by the split that their names say; "" where they say none."""
    entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    by_split: dict[str, list[Path]] = {}
    for entry in entries:
        _require_unpacked(entry)
        if entry.suffix.lower() in _SUFFIXES and entry.is_file():
            by_split.setdefault(_split_of(entry.name), []).append(entry)
    if not by_split:
        file_names = _listed([entry.name for entry in entries]) or "nothing"
        raise ValueError(
            f"no data files in {directory}: found {file_names}; expected names that end in "
            f"{', '.join(_SUFFIXES)}, or a directory written by datasets' save_to_disk"
        )
    if list(by_split) == [""]:
        _require_one_kind(directory, by_split[""])
    return by_split


def _require_unpacked(path: Path) -> None:
    """Raises: ValueError for a compressed data file, which nobody means to leave out."""
    if path.suffix.lower() in _COMPRESSED and Path(path.stem).suffix.lower() in _SUFFIXES:
        raise ValueError(f"{path} is compressed, which is not read; unpack it to {path.stem}, or move it away")


def _require_one_kind(directory: Path, files: Sequence[Path]) -> None:
    """Files without a split are joined, but not where their names leave open whether they are several splits. Names
    that differ in numbers only (`latest_1`, `latest_2`) are parts of one thing."""
    doubtful = [file.name for file in files if _MAY_BE_A_SPLIT.search(file.stem.lower())]
    if doubtful and len({re.sub(r"[-._ 0-9]", "", file.stem.lower()) for file in files}) > 1:
        raise ValueError(
            f"{directory} has {len(files)} data files, and may mix splits such as train and test; these names do "
            f"not say clearly: {_listed(doubtful)}. Give the path of the one file that is meant. Or rename the files "
            "so that the split is a word of its own (math_train.jsonl, math_test.jsonl) and name it (data.train_split, "
            "data.validation_split). Or, if all are meant, move them to a directory as part_1, part_2 and so on"
        )


def _split_of(name: str) -> str:
    """As `datasets` reads names: `train_sft-00000-of-00002.parquet` -> train_sft, `math_Test.jsonl` -> test; "" where
    a name says no split, or more than one (`train_heldout.jsonl`)."""
    if shard := _SHARD.match(name):
        return shard[1]
    splits = {_SPLIT_WORDS[word] for word in _SPLIT_WORD.findall(name.lower())}
    return splits.pop() if len(splits) == 1 else ""


def _read_file(path: Path) -> _Located:
    if path.suffix.lower() in _JSON_SUFFIXES:
        yield from _read_json(path)
        return
    _require_unpacked(path)
    builder = _DATASETS_BUILDERS.get(path.suffix.lower())
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


def _read_hub(name: str, split: str | None) -> _Located:
    from datasets import get_dataset_split_names, load_dataset

    with tempfile.TemporaryDirectory(prefix="megarlhf-data-") as cache:
        try:
            splits = get_dataset_split_names(name) if split is None else [split]
            rows = None
            if len(splits) == 1:
                rows = load_dataset(name, split=splits[0], cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # network, name, split, permission: one message for all
            raise ValueError(
                f"{name} is not on disk, and loading it from the Hugging Face hub (split {split or 'not named'}) "
                f"failed: {type(error).__name__}: {error}; check the name, or download it where there is a network"
            ) from error
        yield from _rows(rows, f"{name}[{_chosen(name, splits, split)}]")


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
        return json.loads(text, object_pairs_hook=_object)
    except _DuplicateKey as error:
        where = f"{path}, in one of its rows" if text.startswith("[") else f"{path}, line {first_line}"
        raise ValueError(f"{where}: {error}; expected each key once: remove or rename one") from error
    except json.JSONDecodeError as error:
        fragment = text[max(error.pos - _FRAGMENT // 2, 0) : error.pos + _FRAGMENT // 2].strip()
        raise ValueError(
            f"{path}, line {first_line + error.lineno - 1}: malformed JSON ({error.msg}, column "
            f"{error.colno}) near {fragment!r}; expected one JSON object a line"
        ) from error


class _DuplicateKey(Exception):
    """Of which a parser would keep the last value, in silence."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in row if keys.count(key) > 1)
        values = ", ".join(_shown(value) for key, value in pairs if key == twice)
        raise _DuplicateKey(f"the key {twice!r} stands {keys.count(twice)} times in one object, with {values}")
    return row


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _FRAGMENT else text[:_FRAGMENT] + "..."


def _checked(row: Any, where: str, fields: Sequence[str]) -> Record:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a JSON object with {', '.join(fields)}, got {type(row).__name__}")
    for field in fields:
        if field not in row:
            raise ValueError(
                f"{where}: no field {field!r}, found {', '.join(map(repr, row)) or 'none'}{_hint(field, row)}"
            )
        _check_type(row[field], field, where)
    record = Record(row)
    record.where = where
    return record


_FORMS = {
    "chosen": "preference pairs, which train a reward model (`megarlhf rm`)",
    "messages": "conversations: set data.template to 'chat'",
    "response": "prompts with responses (`megarlhf sft`)",
    "prompt": "prompts, which `megarlhf rl` and `generate` take",
}
"""What rows with a field of this name are; the most telling first."""


def _hint(missing: str, row: Mapping[str, Any]) -> str:
    """What may have been meant: a field whose name is nearly right, or another kind of data."""
    others = [name for name in row if name not in (*_FORMS, "rejected", "answer")]
    if nearest := difflib.get_close_matches(missing, others, n=1, cutoff=0.6):
        return f"; is it {nearest[0]!r}? Then rename it"
    form = _form(row)
    return f"; these rows look like {form}" if form else f"; rename the one that is meant, or add {missing!r}"


def _form(row: Mapping[str, Any]) -> str:
    """What the row is, in words; "" where no field tells it."""
    return next((form for name, form in _FORMS.items() if name in row), "")


def _check_type(value: Any, field: str, where: str) -> None:
    if field == "messages":
        good = isinstance(value, list) and all(
            isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in value or [{}]
        )
        expected = "a list of {role, content} of strings, with one message at least"
    else:
        good, expected = isinstance(value, str), "a string"
    if not good:
        got = f"{type(value).__name__} {_shown(value)}"
        raise ValueError(f"{where}: field {field!r} is {got}, expected {expected}; convert the data")
