"""The header of a GGUF file: what it says of the model, and which bytes each tensor has. No tensor is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megarlhf.placement import Shape

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
"""The end of the name of one file of several."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values by their number, as `struct` names them."""
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file."""

    name: str
    shape: Shape
    """As torch has it: the dim whose elements are neighbours comes last."""
    type: int
    """ggml's number of the way in which numbers are stored."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file, opened: its header has been read."""

    path: Path
    size: int
    metadata: Mapping[str, Any]
    """Numbers, texts, truth values, and lists of them."""
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's word for the family."""
        return str(self.metadata["general.architecture"])


def read_gguf(path: str | PathLike[str]) -> GGUFFile:
    """Raises: ValueError when it is no GGUF file, one part of several, no language model, truncated or damaged."""
    path = Path(path)
    _require_gguf(path)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        _, version, num_tensors, num_values = reader.take("4sIQQ")
        if version not in VERSIONS:
            raise ValueError(
                f"{path} says GGUF version {version}, expected {' or '.join(map(str, VERSIONS))}, little-endian; make "
                "the file again with a present llama.cpp"
            )
        reader.require(num_values * 13 + num_tensors * 32)  # the least that so many take
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key, value = reader.text(), reader.value(*reader.take("I"))
            if key in metadata:
                raise ValueError(f"{path} states {key} twice; it is damaged: copy it again")
            metadata[key] = value
        _require_whole_model(path, metadata)
        entries = [reader.tensor() for _ in range(num_tensors)]
        data_start = _aligned(reader.at, _alignment(path, metadata))
    tensors = {entry.name: entry for entry in (_placed(entry, data_start) for entry in entries)}
    if len(tensors) != num_tensors:
        raise ValueError(f"{path} has {num_tensors} tensors of {len(tensors)} names; it is damaged: copy it again")
    return GGUFFile(path, size, metadata, tensors)


def _require_gguf(path: Path) -> None:
    if not path.is_file():
        what = "is a directory; name a .gguf file in it" if path.is_dir() else "does not exist; correct the path"
        raise ValueError(f"{path} {what}")
    with path.open("rb") as file:
        start = file.read(4)
    if start != MAGIC:
        raise ValueError(f"{path} begins with {start!r}, expected {MAGIC!r}: it is no GGUF file; name one")
    if path.stat().st_size < 24:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; it is truncated: copy it again")


def _require_whole_model(path: Path, metadata: Mapping[str, Any]) -> None:
    named = PART.search(path.name)
    stated = metadata.get("split.count", 0)
    count = max(stated if type(stated) is int else 0, int(named[1]) if named else 0)
    if count > 1:
        raise ValueError(
            f"{path} is one of {count} files that a model is split over; put them together first: `llama-gguf-split "
            "--merge FIRST_FILE WHOLE_FILE` of llama.cpp"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{path} holds a {kind!r} (general.type), expected a 'model'; name the model's own file")
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError(f"{path} states no general.architecture: it is no model of llama.cpp's; name another file")


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path} has general.alignment = {alignment!r}, expected a power of two; copy it again")
    return alignment


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _placed(entry: StoredTensor, data_start: int) -> StoredTensor:
    return StoredTensor(entry.name, entry.shape, entry.type, data_start + entry.offset)


class _Reader:
    """Reads values one behind another; nothing beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def require(self, num_bytes: int) -> None:
        """Raises: ValueError unless so many bytes follow."""
        if self.at + num_bytes > len(self.data):
            raise ValueError(
                f"{self.path} has {len(self.data)} bytes, and its header goes on beyond them (at byte {self.at}); it "
                "is truncated or damaged: copy it again"
            )

    def take(self, format: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{format}")
        self.require(size)
        values = struct.unpack_from(f"<{format}", self.data, self.at)
        self.at += size
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        self.require(length)
        raw = self.data[self.at : self.at + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: the text at byte {self.at} is no UTF-8; copy it again") from error
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        (value,) = self.take(self._number(kind))
        return shortest(value) if kind == _FLOAT else value

    def _array(self) -> list[Any]:
        kind, count = self.take("IQ")
        if kind == _STRING:
            self.require(8 * count)
            return [self.text() for _ in range(count)]
        letter = self._number(kind)
        self.require(struct.calcsize(letter) * count)
        return list(self.take(f"{count}{letter}"))

    def _number(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"{self.path}: a value of type {kind} at byte {self.at}, which is unknown; copy it again")
        return _NUMBERS[kind]

    def tensor(self) -> StoredTensor:
        """Its offset counts from where all tensors begin."""
        name = self.text()
        (num_dims,) = self.take("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"{self.path}: {name} has {num_dims} dims, expected 1 to {_MAX_DIMS}; copy it again")
        dims = self.take(f"{num_dims}Q")
        type_, offset = self.take("IQ")
        if not math.prod(dims):
            raise ValueError(f"{self.path}: {name} has shape {dims}, no elements; copy it again")
        return StoredTensor(name, tuple(reversed(dims)), type_, offset)


def shortest(value: float) -> float:
    """The shortest decimal that is this number in 32 bits: 1e-05 for 9.999999747378752e-06, as config.json had it."""
    return float(str(np.float32(value)))
