"""Sources of records: files, directories, patterns, saved datasets, names of the hub, generated tasks and prompts.

A source is found without reading its data (`find`) and read in chunks of bounded size (`FoundSource.chunks`);
`fields.Reader` turns the rows into records. What `datasets` has to cache goes to a temporary directory of this
process, which is removed on return. So ranks that load the same file share nothing and cannot race.
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
from megarlhf.data.sources import environment_source, reasoning_gym
from megarlhf.data.sources.environment_source import is_environment, require_environment
from megarlhf.data.sources.fields import form_of
from megarlhf.data.sources.megatron_files import indexed_files, indexed_prefix
from megarlhf.data.sources.procedural import is_procedural, items_of
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
from megarlhf.data.sources.reasoning_gym import require_task
from megarlhf.data.sources.splits import (
    chosen_split,
    files_of_directory,
    files_of_pattern,
    is_pattern,
    list_names,
    passed_over,
    saved_splits,
)

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_MOST_COMPARED = 1000
"""Files of a directory whose first rows are compared before any file is read whole."""


@dataclass(frozen=True)
class FoundSource:
    """A source and its files."""

    source: SourceConfig
    kind: Literal["files", "saved", "hub", "generated", "indexed"]
    files: tuple[Path, ...] = ()
    """Files to read, in order; the directory of a saved dataset. Empty for hub names and generated data."""
    passed_over: tuple[str, ...] = ()
    """Entries of the directory that are not read."""

    def chunks(self) -> Iterator[Chunk]:
        """Read all rows, in order. Raises: ValueError for what cannot be read."""
        name = str(self.source.path)
        assert self.kind != "indexed", "it has no rows: see megatron_indexed"
        if self.kind == "files":
            self._require_one_kind()
            for file in self.files:
                yield from read_chunks(file)
        elif self.kind == "saved":
            yield from chunks_of_rows(_saved_rows(self.files[0]), str(self.files[0]), "row")
        elif self.kind == "generated":
            generate = environment_source.generate if is_environment(name) else reasoning_gym.generate
            yield from chunks_of_rows(generate(name), name, "item", first=0)
        else:
            yield from _hub_chunks(self.source)

    def first_rows(self, count: int) -> list[tuple[str, Any]]:
        """The first rows of each of the first files, with their locations; of an environment, its first records. Empty
        for other sources that are not on disk."""
        if self.kind == "files":
            self._require_one_kind()
            return [row for file in self.files[:3] for row in first_rows(file, count)]
        if self.kind == "saved":
            rows = _saved_rows(self.files[0])
            return [(f"{self.files[0]}, row {n + 1}", dict(rows[n])) for n in range(min(count, len(rows)))]
        if is_environment(name := self.source.path):
            records = environment_source.first_records(str(name))[:count]
            return [(f"{name}, item {n}", dict(record)) for n, record in enumerate(records)]
        return []

    def count_rows(self, most_bytes: int, enough: int) -> int | None:
        """Count the rows. None where that takes more than `most_bytes` of lines, or `enough` rows of other files.
        Raises: ValueError for what cannot be read so far."""
        if self.kind == "files":
            total = 0
            for file in self.files:
                count = count_rows(file, most_bytes // len(self.files), max(0, enough - total))
                if count is None:
                    return None
                total += count
            return total
        if self.kind == "saved":
            return len(_saved_rows(self.files[0]))
        return items_of(str(self.source.path)) if self.kind == "generated" else None

    def describe_files(self) -> str:
        """List the files of a directory that are read and the entries that are not, for a note. Empty for other
        sources."""
        path = self.source.path
        if self.kind != "files" or not (path.is_dir() or is_pattern(path)):
            return ""
        names = [file.name for file in self.files]
        description = f"; read {len(names)} file{'s' * (len(names) > 1)}: {list_names(names)}"
        if self.passed_over:
            description += f"; passed over, as folders and other kinds of files are: {list_names(self.passed_over)}"
        return description

    def _require_one_kind(self) -> None:
        """Raises: ValueError where the files hold different kinds of data."""
        forms: dict[str, str] = {}
        for file in self.files[:_MOST_COMPARED] if len(self.files) > 1 else ():
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
    """Find the files of a source. No data is read.

    Raises: ValueError that names the nearest neighbour of a missing path, or lists the splits of a source with
    several.
    """
    path, split = source.path, source.split
    if source.kind == "megatron":
        return FoundSource(source, "indexed", indexed_files(path))
    if is_procedural(path):
        _require_unsplit(source, f"{path} is generated and has")
        (require_environment if is_environment(path) else require_task)(str(path))
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


def is_there(sources: Sequence[SourceConfig]) -> bool:
    """Tell whether all sets can be read without a network."""

    def exists(source: SourceConfig) -> bool:
        if source.kind == "megatron":
            return all(Path(f"{indexed_prefix(source.path)}{ending}").exists() for ending in (".bin", ".idx"))
        return source.path.exists() or is_procedural(source.path) or is_pattern(source.path)

    return all(map(exists, sources))


def source_files(sources: Sequence[SourceConfig]) -> set[Path]:
    """Files that are read of the sources, or the directory of a saved dataset, with links and `..` resolved. Empty for
    hub names and generated data. Raises: ValueError as `find`."""
    return {file.resolve() for source in sources for file in find(source).files}


def _require_unsplit(source: SourceConfig, subject: str) -> None:
    for key in ("split", "subset"):
        if (value := getattr(source, key)) is not None:
            raise ValueError(f"{subject} no {key} {value!r}; leave the {key} out")


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
            return []  # load_from_disk does not read an empty dataset
        return load_from_disk(str(directory))
    except Exception as error:  # of JSON, of Arrow, of missing files
        raise ValueError(
            f"{directory} is not a whole dataset of save_to_disk: {type(error).__name__}: "
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
