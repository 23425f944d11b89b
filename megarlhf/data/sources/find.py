"""Sources: where records come from. Files, directories, patterns, saved datasets, names of the hub, generators.

A source is found without reading its data (`find`), read in chunks of bounded size (`FoundSource.chunks`), and its rows
made records of by `fields.Reader`. What `datasets` has to cache goes to a temporary directory of this process, which is
removed on return: ranks that load the same file share nothing, so they cannot race.
"""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarlhf.config import SourceConfig
from megarlhf.data.sources.fields import Fields, Record, form_of, records_of
from megarlhf.data.sources.megatron_files import files_of, prefix_of
from megarlhf.data.sources.read import (
    COMPRESSED,
    SUFFIXES,
    Chunk,
    chunks_of_rows,
    count_rows,
    first_rows,
    kind_of,
    read_chunks,
)
from megarlhf.data.sources.reasoning_gym import generate, is_procedural, items_of, require_task
from megarlhf.data.sources.splits import (
    chosen_split,
    files_of_directory,
    files_of_pattern,
    is_pattern,
    passed_over,
    saved_splits,
)

__all__ = ["FoundSource", "Record", "files_in_words", "find", "load_records", "require_source", "source_files"]

AnySource = str | Path | SourceConfig | Sequence[SourceConfig]
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_LOOKED_AT = 1000
"""Files of a directory whose first row is compared before any is read whole."""


@dataclass(frozen=True)
class FoundSource:
    """A source that was found."""

    source: SourceConfig
    kind: Literal["files", "saved", "hub", "generated", "indexed"]
    files: tuple[Path, ...] = ()
    """What is read, in order; of a saved dataset its directory. Empty for a hub name and for what is generated."""
    passed_over: tuple[str, ...] = ()
    """Other entries of the directory."""

    def chunks(self) -> Iterator[Chunk]:
        """All rows, in order. Raises: ValueError for what cannot be read."""
        name = str(self.source.path)
        assert self.kind != "indexed", "it has no rows: see megatron_indexed"
        if self.kind == "files":
            self._require_one_kind()
            for file in self.files:
                yield from read_chunks(file)
        elif self.kind == "saved":
            yield from chunks_of_rows(_saved_rows(self.files[0]), str(self.files[0]), "row")
        elif self.kind == "generated":
            for chunk in chunks_of_rows(generate(name), name, "item"):
                yield Chunk(chunk.name, chunk.unit, [number - 1 for number in chunk.numbers], chunk.rows)
        else:
            yield from _hub_chunks(self.source)

    def first_rows(self, count: int) -> list[tuple[str, Any]]:
        """Of what is on disk: the first rows of each of its first files, with where they stand."""
        if self.kind == "files":
            self._require_one_kind()
            return [row for file in self.files[:3] for row in first_rows(file, count)]
        if self.kind == "saved":
            rows = _saved_rows(self.files[0])
            return [
                (f"{self.files[0]}, row {number + 1}", dict(rows[number])) for number in range(min(count, len(rows)))
            ]
        return []

    def count_rows(self, most_bytes: int, enough: int) -> int | None:
        """How many rows there are, where that can be told without reading more than so many bytes of lines, or than
        `enough` rows of other files. Raises: ValueError for what cannot be read so far."""
        if self.kind == "files":
            counts: list[int] = []
            for file in self.files:
                count = count_rows(file, most_bytes // len(self.files), max(0, enough - sum(counts)))
                if count is None:
                    return None
                counts.append(count)
            return sum(counts)
        if self.kind == "saved":
            return len(_saved_rows(self.files[0]))
        return items_of(str(self.source.path)) if self.kind == "generated" else None

    def _require_one_kind(self) -> None:
        """Raises: ValueError where the files hold different kinds of data."""
        forms: dict[str, str] = {}
        for file in self.files[:_LOOKED_AT] if len(self.files) > 1 else ():
            for _, row in first_rows(file, 1):
                if isinstance(row, Mapping):
                    forms.setdefault(form_of(row), file.name)
        if len(forms) > 1:
            listed = "; ".join(f"{name} looks like {form or 'none that is known'}" for form, name in forms.items())
            raise ValueError(
                f"{self.source.path} mixes different kinds of data, which are not joined: {listed}. Give the path of "
                "the one file that is meant, or of a directory with files of one kind"
            )


def find(source: SourceConfig) -> FoundSource:
    """What a source is. No data is read.

    Raises: ValueError that names the nearest neighbour of a path that is not there, or lists the splits of a source
    that has several.
    """
    path, split = source.path, source.split
    if source.kind == "megatron":
        return FoundSource(source, "indexed", files_of(path))
    if is_procedural(path):
        _require_unsplit(source, f"{path} is generated and has")
        require_task(str(path))
        return FoundSource(source, "generated")
    if is_pattern(path):
        by_split = files_of_pattern(path)
        return FoundSource(source, "files", tuple(by_split[chosen_split(str(path), by_split, split)]))
    if path.is_dir():
        if saved := saved_splits(path):
            within = path if saved == [""] and split is None else path / chosen_split(str(path), saved, split)
            return FoundSource(source, "saved", (within,))
        by_split = files_of_directory(path, source.subset)
        files = by_split[chosen_split(str(path), by_split, split)]
        return FoundSource(source, "files", tuple(files), tuple(passed_over(path, by_split)))
    if path.exists():
        _require_unsplit(source, f"{path} is one file and has")
        return FoundSource(source, "files", (path,))
    if not _is_hub_name(str(path)):
        raise ValueError(_missing(path))
    return FoundSource(source, "hub")


def sources_of(given: AnySource, split: str | None = None) -> tuple[SourceConfig, ...]:
    """A path, or sources, as a list of sources."""
    if isinstance(given, SourceConfig):
        return (given,)
    if isinstance(given, str | Path):
        return (SourceConfig(path=Path(given), split=split),)
    return tuple(given)


def load_records(source: AnySource, *, fields: Fields, split: str | None = None) -> list[Record]:
    """Every row as a dict, all columns kept, in the order of the files. For small data: nothing is kept on disk.

    source:   a path, or what the configuration says of one or several sets
    fields:   must stand in every row: non-null strings, but for `messages`, a list of {role, content}, not empty
    split:    of a path that has several
    Raises:   ValueError that names file, line or row, what was found and what was expected, or the splits of a source
              that has several
    """
    records = []
    for each in sources_of(source, split):
        rows = list(records_of(find(each).chunks(), each, fields))
        if not rows:
            raise ValueError(f"no rows in {each.words}; give data")
        records += rows
    return records


def require_source(source: AnySource, split: str | None = None) -> None:
    """Raises: ValueError as `find`."""
    for each in sources_of(source, split):
        find(each)


def is_there(sources: Sequence[SourceConfig]) -> bool:
    """Whether all sets can be read without a network."""

    def there(source: SourceConfig) -> bool:
        if source.kind == "megatron":
            return all(Path(f"{prefix_of(source.path)}{ending}").exists() for ending in (".bin", ".idx"))
        return source.path.exists() or is_procedural(source.path) or is_pattern(source.path)

    return all(map(there, sources))


def source_files(source: AnySource, split: str | None = None) -> set[Path]:
    """What is read of sources on disk: files, or the directory of a saved dataset, without links and `..`. Empty for a
    hub name and for what is generated. Raises: ValueError as `find`."""
    return {file.resolve() for each in sources_of(source, split) for file in find(each).files}


def files_in_words(source: AnySource, split: str | None = None) -> str:
    """Which files of a directory are read and which entries are not, and why, for a note; empty for other sources."""
    (source,) = sources_of(source, split)
    place = find(source)
    if place.kind != "files" or not (source.path.is_dir() or is_pattern(source.path)):
        return ""
    names = [file.name for file in place.files]
    words = f"; read {len(names)} file{'s' * (len(names) > 1)}: {_listed(names)}"
    if place.passed_over:
        words += f"; passed over, as folders and other kinds of files are: {_listed(place.passed_over)}"
    return words


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _require_unsplit(source: SourceConfig, words: str) -> None:
    for key in ("split", "subset"):
        if (value := getattr(source, key)) is not None:
            raise ValueError(f"{words} no {key} {value!r}; leave the {key} out")


def _is_hub_name(name: str) -> bool:
    """`data/trian` beside a directory `data` is a misspelt path and must not go to the network."""
    first = name.split("/")[0]
    looks_like_a_file = kind_of(name)[0] or name.lower().endswith((*SUFFIXES, *COMPRESSED))
    return bool(_HUB_NAME.fullmatch(name)) and not looks_like_a_file and not Path(first).exists()


def _missing(path: Path) -> str:
    parent = path.parent
    while not parent.exists():
        path, parent = parent, parent.parent
    siblings = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.0)
    hint = f"; the nearest name beside it is {parent / nearest[0]}" if nearest else f"; {parent} is empty"
    return f"no such data file or directory: {path}{hint}"


def _saved_rows(directory: Path) -> Any:
    from datasets import load_from_disk

    try:
        if json.loads((directory / "state.json").read_text(encoding="utf-8"))["_data_files"] == []:
            return []  # which load_from_disk does not read
        return load_from_disk(str(directory))
    except Exception as error:  # what its readers raise: JSON, Arrow, missing files
        raise ValueError(
            f"{directory} is not a dataset that save_to_disk has written whole: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}; save it again"
        ) from error


def _hub_chunks(source: SourceConfig) -> Iterator[Chunk]:
    from datasets import get_dataset_split_names, load_dataset

    name, split = str(source.path), source.split
    subset = () if source.subset is None else (source.subset,)
    with tempfile.TemporaryDirectory(prefix="megarlhf-data-") as cache:
        try:
            splits = get_dataset_split_names(name, *subset) if split is None else [split]
            rows = load_dataset(name, *subset, split=splits[0], cache_dir=cache) if len(splits) == 1 else None
        except Exception as error:  # network, name, split, permission: one message for all
            raise ValueError(
                f"{name} is not on disk, and loading it from the Hugging Face hub (split {split or 'not named'}) "
                f"failed: {type(error).__name__}: {error}; check the name, or download it where there is a network"
            ) from error
        split = chosen_split(name, splits, split)
        assert rows is not None
        yield from chunks_of_rows(rows, f"{name}[{split}]", "row")
