"""Samples as columns in files, which ranks map into memory and share.

A directory holds samples of one dataclass, with a column per field: token ids, texts, numbers, JSON values. A column is
a file of values and, if a sample has several of them, a file of offsets: tokens [[5, 6], [7]] are `tokens.bin` with
5 6 7 and `tokens.offsets` with 0 2 3. Two further columns hold the number of each sample's record in the source, and a
digest of its prompt. `MANIFEST.json` is written last and lists every file with its size and a digest (`blocks`).
"""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import json
import os
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from megarlhf.data.blocks import digest_of_blocks

FORMAT = 3
"""Version of the files. It is part of the cache's keys, so no version reads another's files."""
MANIFEST = "MANIFEST.json"
RECORD, PROMPT = "record", "prompt_digest"
Kind = Literal["tokens", "text", "json", "int", "float", "digest"]
RAGGED = ("tokens", "text", "json")
DTYPES: Mapping[str, type[np.generic]] = {
    "tokens": np.int32, "text": np.uint8, "json": np.uint8, "int": np.int64, "float": np.float64, "digest": np.uint64,
}  # fmt: skip
Array = np.ndarray[Any, Any]


def kinds_of(sample_type: type[Any]) -> dict[str, Kind]:
    """Kinds of the columns: one per field of a sample, and the two further ones."""
    hints = typing.get_type_hints(sample_type)
    kinds: dict[Any, Kind] = {list[int]: "tokens", str: "text", int: "int", float: "float"}
    columns: dict[str, Kind] = {field.name: kinds.get(hints[field.name], "json") for field in fields(sample_type)}
    return {**columns, f"_{RECORD}": "int", f"_{PROMPT}": "digest"}


@dataclass(frozen=True)
class Packed:
    """Samples of one chunk of records as columns, and counts of the other records."""

    num_samples: int
    num_records: int
    lengths: dict[str, Array]
    """[samples] number of values of each sample, for each column with several."""
    values: dict[str, bytes]
    skipped: Counter[str] = field(default_factory=Counter)
    """Records that were left out, by reason."""
    changed: Counter[str] = field(default_factory=Counter)
    """Samples that do not hold all of their record, by the change."""
    unread: Counter[str] = field(default_factory=Counter)
    """Records with a value in a column that is not read, by column."""


def pack(samples: Sequence[Any], records: Sequence[int], kinds: Mapping[str, Kind]) -> Packed:
    """Convert samples to columns. `records` are their numbers in the source."""
    lengths: dict[str, Array] = {}
    values: dict[str, bytes] = {}
    for name, kind in kinds.items():
        if name == f"_{RECORD}":
            cells: list[Any] = list(records)
        elif name == f"_{PROMPT}":
            cells = [_prompt_digest(sample) for sample in samples]
        else:
            cells = [getattr(sample, name) for sample in samples]
        if kind in RAGGED:
            cells = [_encoded(cell, kind) for cell in cells]
            size = np.dtype(DTYPES[kind]).itemsize
            lengths[name] = np.array([len(cell) // size for cell in cells], dtype=np.int64)
            values[name] = b"".join(cells)
        else:
            values[name] = np.array(cells, dtype=DTYPES[kind]).tobytes()
    return Packed(len(samples), 0, lengths, values)


def _encoded(cell: Any, kind: Kind) -> bytes:
    if kind == "tokens":
        return np.array(cell, dtype=np.int32).tobytes()
    if kind == "text":
        return str(cell).encode("utf-8", "surrogatepass")
    return json.dumps(cell, ensure_ascii=True, separators=(",", ":"), default=_tagged).encode()


def decode_cell(raw: Array, kind: Kind) -> Any:
    if kind == "tokens":
        return raw.tolist()
    if kind == "text":
        return raw.tobytes().decode("utf-8", "surrogatepass")
    return json.loads(raw.tobytes(), object_hook=_untagged)


_TAG = "__megarlhf__"


def _tagged(value: Any) -> dict[str, Any]:
    """JSON for values of Parquet and Arrow columns that JSON cannot hold itself."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return {_TAG: type(value).__name__, "value": value.isoformat()}
    if isinstance(value, decimal.Decimal):
        return {_TAG: "Decimal", "value": str(value)}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    raise ValueError(f"a column holds a {type(value).__name__}, which is not kept; leave the column out, or convert it")


_UNTAG = {
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "Decimal": decimal.Decimal,
    "bytes": base64.b64decode,
}


def _untagged(value: dict[str, Any]) -> Any:
    return _UNTAG[value[_TAG]](value["value"]) if _TAG in value else value


def _prompt_digest(sample: Any) -> int:
    """A digest of the prompt's tokens."""
    tokens = sample.prompt_tokens if hasattr(sample, "prompt_tokens") else sample.tokens
    length = getattr(sample, "prompt_length", len(tokens))
    raw = np.array(tokens[:length], dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class ColumnWriter:
    """Appends samples to the files of a directory."""

    def __init__(self, directory: Path, sample_type: type[Any]) -> None:
        self._directory, self._type = directory, sample_type
        self.kinds = kinds_of(sample_type)
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        self._ends = dict.fromkeys((name for name, kind in self.kinds.items() if kind in RAGGED), 0)
        for name in self.kinds:
            self._open(f"{name}.bin")
        for name in self._ends:
            self._open(f"{name}.offsets")
            self._write(f"{name}.offsets", np.zeros(1, dtype=np.int64).tobytes())
        self.num_samples = self.num_records = 0
        self.skipped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()

    def _open(self, name: str) -> None:
        self._files[name] = (self._directory / name).open("wb")
        self._digests[name] = hashlib.sha256()

    def _write(self, name: str, raw: bytes) -> None:
        self._files[name].write(raw)
        self._digests[name].update(raw)

    def append(self, packed: Packed) -> None:
        """Append samples."""
        for name, raw in packed.values.items():
            self._write(f"{name}.bin", raw)
        for name, lengths in packed.lengths.items():
            ends = self._ends[name] + np.cumsum(lengths)
            self._write(f"{name}.offsets", ends.astype(np.int64).tobytes())
            self._ends[name] = int(ends[-1]) if len(ends) else self._ends[name]
        self.num_samples += packed.num_samples
        self.num_records += packed.num_records
        self.skipped += packed.skipped
        self.changed += packed.changed
        self.unread += packed.unread

    def finish(self, **others: Any) -> None:
        """Flush all files and write the manifest."""
        sizes = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
            file.close()
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        whole = hashlib.sha256(json.dumps([self._type.__name__, self.kinds, digests], sort_keys=True).encode())
        manifest = {
            "format": FORMAT,
            "samples": self._type.__name__,
            "num_samples": self.num_samples,
            "num_records": self.num_records,
            "skipped": dict(self.skipped),
            "changed": dict(self.changed),
            "unread": dict(self.unread),
            "digest": whole.hexdigest(),
            "files": sizes,
            "blocks": {name: digest_of_blocks(self._directory / name) for name in sizes},
            **others,
        }
        with (self._directory / MANIFEST).open("w", encoding="utf-8") as out:
            json.dump(manifest, out, indent=1)
            out.flush()
            os.fsync(out.fileno())

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest. Raises: ValueError where a file is missing, or its size or content has changed.
    Large files are checked in part (`blocks.digest_of_blocks`)."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        wrong = [name for name, size in manifest["files"].items() if (directory / name).stat().st_size != size]
        digests = {} if wrong else manifest["blocks"]
        other = [name for name, digest in digests.items() if digest_of_blocks(directory / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} is not whole ({error}); remove it, and it is made again") from error
    for names, what in ((wrong, "changed its size"), (other, "changed its content")):
        if names:
            raise ValueError(f"{directory}: {', '.join(names)} {what}; remove the directory, and it is made again")
    return manifest
