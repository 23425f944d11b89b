"""Rows of one file: JSON lines, JSON, CSV, TSV, Parquet, Arrow, each also compressed. No file is held as a whole.

Rows come in chunks of bounded size. JSON lines are parsed when rows are asked for, possibly by a worker process.
CSV cells stay texts: `datasets` would read "007" as 7 and "NA" as null.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import itertools
import lzma
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, cast

from megarlhf.data.json_rows import begins_with_bracket, parse_array, parse_line

JSON, TABLES, COLUMNS = (".jsonl", ".ndjson", ".json"), {".csv": ",", ".tsv": "\t"}, (".parquet", ".arrow")
SUFFIXES = (*JSON, *TABLES, *COLUMNS)
"""Endings of data files. Each may be followed by one of `COMPRESSED`."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_ARCHIVES = (".zip", ".lz4", ".7z", ".rar", ".tar", ".tgz")
CHUNK_ROWS, CHUNK_BYTES = 1000, 4 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file."""

    name: str
    """Name of the file."""
    unit: str
    """Word for a row: line, row, item."""
    numbers: list[int]
    rows: list[Any]
    raw: bool = False
    """Rows are unparsed lines of JSON."""

    def located(self) -> Iterator[tuple[str, Any]]:
        """Each row with its location: ("data.jsonl, line 3", row). Raises: ValueError for one that cannot be read."""
        for number, row in zip(self.numbers, self.rows, strict=True):
            where = f"{self.name}, {self.unit} {number}"
            yield where, parse_line(row, self.name, number) if self.raw else row


def kind_of(name: str) -> tuple[str, str]:
    """Endings for a file's format and its compression. "" for an unknown format, or no compression."""
    path = Path(name.lower())
    compressed = path.suffix if path.suffix in COMPRESSED else ""
    suffix = Path(path.stem).suffix if compressed else path.suffix
    return (suffix, compressed) if suffix in SUFFIXES else ("", "")


def require_readable(path: Path) -> None:
    """Raises: ValueError for a data file in an archive that is not read."""
    name = Path(path.name.lower())
    if name.suffix in _ARCHIVES and Path(name.stem).suffix in SUFFIXES:
        raise ValueError(
            f"{path} is packed in a way that is not read ({name.suffix}; read are {', '.join(COMPRESSED)}); unpack it "
            f"to {path.stem}, or move it away"
        )


def read_chunks(path: Path) -> Iterator[Chunk]:
    """Read the rows of a file, in order. Raises: ValueError that names the file and, if known, the line."""
    suffix, compressed = kind_of(path.name)
    require_readable(path)
    if not suffix:
        raise ValueError(
            f"{path}: cannot tell its format; expected a name that ends in {', '.join(SUFFIXES)}, or in one of these "
            f"and {', '.join(COMPRESSED)}"
        )
    try:
        if suffix in JSON:
            yield from _json(path, compressed)
        elif suffix in TABLES:
            yield from _chunked(_table(path, compressed, TABLES[suffix]), str(path), "line")
        else:
            yield from _chunked(enumerate(_columnar(path, suffix, compressed), 1), str(path), "row")
    except (OSError, EOFError, lzma.LZMAError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        raise ValueError(f"{path}: not a readable {compressed or suffix} file: {error}; write it again") from error


def first_rows(path: Path, count: int) -> list[tuple[str, Any]]:
    """The first rows of a file, with their locations."""
    with contextlib.closing(cast(Any, read_chunks(path))) as chunks:
        located = (row for chunk in chunks for row in chunk.located())
        return list(itertools.islice(located, count))


def count_rows(path: Path, most_bytes: int, enough: int) -> int | None:
    """Count the rows of a file: by metadata, by lines if it has at most `most_bytes`, or by reading if there are fewer
    than `enough`. None otherwise. Raises: ValueError for a file that cannot be read so far."""
    suffix, compressed = kind_of(path.name)
    small = not compressed and path.stat().st_size <= most_bytes
    if not compressed and suffix == ".parquet":
        import pyarrow.parquet as parquet

        with contextlib.suppress(Exception):  # a broken file is reported when it is read
            return int(parquet.read_metadata(path).num_rows)
    if small and suffix == ".arrow":
        with contextlib.suppress(Exception), contextlib.ExitStack() as stack:  # as above
            return sum(batch.num_rows for batch in _batches(str(path), suffix, stack))
    if small and suffix in (".jsonl", ".ndjson"):
        with path.open("rb") as stream:
            if not begins_with_bracket(stream.read(4096)):
                stream.seek(0)
                return sum(1 for line in stream if line.strip())
    total = 0
    with contextlib.closing(cast(Any, read_chunks(path))) as chunks:
        for chunk in chunks:
            if total >= enough:
                return None
            total += len(chunk.rows)
    return total


def _opened(path: Path, compressed: str) -> BinaryIO:
    if compressed == ".zst":
        import pyarrow as pa

        return cast(BinaryIO, BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")))
    openers: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers[compressed](path, "rb"))


def _json(path: Path, compressed: str) -> Iterator[Chunk]:
    with _opened(path, compressed) as stream:
        head = stream.read(4096)
        is_array = begins_with_bracket(head)
    with _opened(path, compressed) as stream:
        if is_array:
            yield from _chunked(enumerate(parse_array(stream, str(path)), 1), str(path), "row")
            return
        numbers: list[int] = []
        lines: list[Any] = []
        size = 0
        # Bytes are split at line feeds only; a str also at U+2028, which a JSON string may hold.
        for line_number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            numbers.append(line_number)
            lines.append(line)
            size += len(line)
            if len(lines) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield Chunk(str(path), "line", numbers, lines, raw=True)
                numbers, lines, size = [], [], 0
        if lines:
            yield Chunk(str(path), "line", numbers, lines, raw=True)


def _chunked(rows: Iterable[tuple[int, Any]], name: str, unit: str) -> Iterator[Chunk]:
    numbered = iter(rows)
    while part := list(itertools.islice(numbered, CHUNK_ROWS)):
        yield Chunk(name, unit, [number for number, _ in part], [row for _, row in part])


def chunks_of_rows(rows: Iterable[Any], name: str, unit: str, first: int = 1) -> Iterator[Chunk]:
    """Chunks of rows in memory or of a saved dataset. `first`: number of the first row."""
    return _chunked(enumerate(map(without_absent, rows), first), name, unit)


def without_absent(row: Mapping[str, Any]) -> dict[str, Any]:
    """A columnar row without the keys that are null in its messages and tool descriptions: there, each object has the
    keys of all rows."""
    return {name: _without_nulls(value) if _is_of_objects(value) else value for name, value in row.items()}


def _is_of_objects(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and not {"role", "from", "function", "type", "name"}.isdisjoint(first)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _table(path: Path, compressed: str, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV or TSV file. The first line names the columns; every value is a text."""
    csv.field_size_limit(1 << 31)
    with _opened(path, compressed) as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        columns: list[str] = []
        try:
            for cells in reader:
                if not cells:
                    continue
                if not columns:
                    columns = _header(cells, path)
                elif len(cells) != len(columns):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells, and the first line names "
                        f"{len(columns)} columns ({', '.join(columns)}); put quotes around a cell with {delimiter!r}"
                    )
                else:
                    yield reader.line_num, dict(zip(columns, cells, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: broken table ({error}); write it again") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, near line {reader.line_num + 1}: not UTF-8 ({error.reason}); convert the file"
            ) from error


def _header(cells: list[str], path: Path) -> list[str]:
    columns = [cell.strip() for cell in cells]
    if twice := sorted({name for name in columns if columns.count(name) > 1 or not name}):
        raise ValueError(
            f"{path}, line 1: the columns are {', '.join(map(repr, columns))}, of which {twice[0]!r} "
            f"{'has no name' if not twice[0] else 'is there twice'}; the first line of a table names each once"
        )
    if len(columns) == 1 and (others := [mark for mark in ";\t|" if mark in columns[0]]):
        raise ValueError(
            f"{path}, line 1 is one column, {columns[0]!r}: cells are separated by ',' in .csv, tabs in .tsv, not by "
            f"{others[0]!r}; write the file again"
        )
    return columns


def _columnar(path: Path, suffix: str, compressed: str) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet or Arrow file. These are read from the end, so a compressed one is unpacked to a temporary
    file."""
    import pyarrow as pa

    with contextlib.ExitStack() as stack:
        source: Any = str(path)
        if compressed:
            source = stack.enter_context(tempfile.TemporaryFile(prefix="megarlhf-data-"))
            with _opened(path, compressed) as packed:
                shutil.copyfileobj(packed, source)
            source.seek(0)
        try:
            for batch in _batches(source, suffix, stack):
                if len(set(batch.schema.names)) < len(batch.schema.names):
                    raise ValueError(f"{path}: a column name is twice among {', '.join(batch.schema.names)}")
                yield from map(without_absent, batch.to_pylist())
        except pa.ArrowException as error:
            raise ValueError(f"{path}: not a readable {suffix} file: {error}; write it again") from error


def _batches(source: Any, suffix: str, stack: contextlib.ExitStack) -> Iterator[Any]:
    import pyarrow as pa

    if suffix == ".parquet":
        import pyarrow.parquet as parquet

        yield from stack.enter_context(parquet.ParquetFile(source)).iter_batches(batch_size=CHUNK_ROWS)
        return
    mapped = stack.enter_context(pa.memory_map(source) if isinstance(source, str) else pa.PythonFile(source, "r"))
    try:
        reader = pa.ipc.open_file(mapped)
        batches: Iterable[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        mapped.seek(0)
        batches = pa.ipc.open_stream(mapped)
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            yield batch.slice(start, CHUNK_ROWS)
