"""Files of `torch.save`: read as structures of extents, and written as skeletons with holes for the tensors.

The format is a zip archive: record `data.pkl` has the structure, `data/<key>` the bytes of each storage, and a
few small ones state versions. No tensor is made in either direction.

torch can write such holes and tell such offsets too, by fake tensors. That takes 20 to 60 times as long, and torch does
not notice some damage that moves a tensor (docs/log.md, `python -m benchmarks.torch_files`).
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarlhf.placement import Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.torch_file.unpickle import (
    ALLOWED,
    INERT,
    STORAGE_DTYPES,
    UNTYPED,
    Name,
    unpickle,
)
from megarlhf.weights.checkpoint.formats.torch_file.zip_archive import (
    ALIGNMENT,
    FileRange,
    ZipRecord,
    ZipWriter,
    damaged,
    open_binary,
    write_crc,
    zip_records,
)
from megarlhf.weights.transport.extent import Extent


class _Storage(NamedTuple):
    """A storage in the file, as the pickle refers to it. A tuple: a pickle cannot give it another state."""

    record: ZipRecord
    dtype: torch.dtype | str


class _Archive:
    """An archive while its pickle is read."""

    def __init__(self, part: FileRange) -> None:
        self.part = part
        records = zip_records(part)
        pickles = [r.name for r in records if r.name.count("/") == 1 and r.name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise damaged(part.path, f"it has {len(pickles)} records data.pkl, expected one")
        self.prefix = pickles[0].removesuffix("data.pkl")
        self.records = {record.name.removeprefix(self.prefix): record for record in records}
        order = self.content("byteorder").strip() if "byteorder" in self.records else b"little"
        if order != b"little":
            raise ValueError(
                f"{part.path} was written on a machine with byte order {order.decode('ascii', 'replace')!r}, expected "
                "'little'; read it there with torch.load and save it as safetensors"
            )

    def content(self, name: str) -> bytes:
        record = self.records[name]
        raw = self.part.read(record.start - self.part.offset, record.size)
        if record.crc and zlib.crc32(raw) != record.crc:
            raise damaged(self.part.path, f"record {name} has CRC {zlib.crc32(raw):08x}, expected {record.crc:08x}")
        return raw

    def storage(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        record = self.records[f"data/{key}"]
        itemsize = 1 if dtype == UNTYPED else dtype.itemsize
        if kind != "storage" or record.size != numel * itemsize:
            raise ValueError(f"storage {key} has {record.size} bytes, expected {numel} x {itemsize}")
        return _Storage(record, dtype)

    def extent(self, storage: _Storage, offset: int, shape: Shape, strides: Shape, dtype: Any) -> Extent:
        numbers = (offset, *shape, *strides)
        sound = isinstance(storage, _Storage) and isinstance(dtype, torch.dtype) and len(shape) == len(strides)
        if not sound or any(not isinstance(n, int) or n < 0 for n in numbers):
            raise ValueError(f"a tensor has offset {offset}, shape {shape}, strides {strides} and dtype {dtype}")
        record = storage.record
        gaps = None if _is_contiguous(shape, strides) else tuple(strides)
        extent = Extent(self.part.path, record.start + offset * dtype.itemsize, tuple(shape), dtype, gaps)
        if extent.end > record.start + record.size:
            raise ValueError(f"a tensor of shape {shape} and strides {strides} leaves its storage {record.name}")
        return extent

    def allowed(self) -> dict[Name, Any]:
        def tensor(storage: _Storage, offset: int, shape: Shape, strides: Shape, *_: Any) -> Extent:
            return self.extent(storage, offset, shape, strides, storage.dtype)

        rebuild: dict[str, Callable[..., Any]] = {
            "_rebuild_tensor": tensor,
            "_rebuild_tensor_v2": tensor,
            "_rebuild_tensor_v3": lambda *args: self.extent(args[0], args[1], args[2], args[3], args[6]),
            "_rebuild_parameter": lambda data, *_: data,
            "_rebuild_parameter_with_state": lambda data, *_: data,
        }

        def with_attributes(function: Callable[..., Any], _: Any, args: tuple[Any, ...], state: Any) -> Any:
            """A tensor or parameter with attributes of its own, which are dropped."""
            return function(*args)

        table: dict[Name, Any] = {("torch._utils", name): function for name, function in rebuild.items()}
        table["torch._tensor", "_rebuild_from_type_v2"] = with_attributes
        for name in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn", "Parameter")):
            table[name] = INERT
        return table


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Row-major without gaps; strides of sizes 0 and 1 do not matter."""
    row_major = contiguous_strides(tuple(shape))
    return 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, row_major, strict=True))


def read_torch_file(
    path: str | PathLike[str],
    *,
    offset: int = 0,
    length: int | None = None,
    allowed: Mapping[Name, Any] = ALLOWED,
    foreign: bool = False,
) -> Any:
    """The object in a file of torch.save, or in a range of a file, with an Extent for every tensor.

    `allowed`, `foreign`: see `unpickle`. Storages' bytes are not read; the pickle's CRC is checked.

    Raises: ValueError when the file is missing, damaged, of the format before torch 1.6, big-endian, or names a
    class that is not allowed.
    """
    path = Path(path)
    with open_binary(path) as file:
        archive = _Archive(FileRange(file, path, offset, length))
        raw = archive.content("data.pkl")
    table = {**allowed, **archive.allowed()}
    return unpickle(raw, allowed=table, foreign=foreign, persistent_load=archive.storage, source=str(path))


def check_crc(path: str | PathLike[str], *, offset: int = 0, length: int | None = None) -> list[str]:
    """Compares the bytes of all records with their CRC-32; returns the records that state none.

    Raises: ValueError that lists the records which differ.
    """
    path = Path(path)
    with open_binary(path) as file:
        part = FileRange(file, path, offset, length)
        records = zip_records(part)
        unstated = [record.name for record in records if record.size and not record.crc]
        damaged_records = [
            record.name
            for record in records
            if record.crc and part.crc(record.start - offset, record.size) != record.crc
        ]
    if damaged_records:
        raise ValueError(
            f"{path} has {len(damaged_records)} damaged records (CRC-32): {', '.join(damaged_records)}; copy it again"
        )
    return unstated


def seal(path: str | PathLike[str], *, offset: int = 0, length: int | None = None) -> None:
    """States the CRC-32 of each record that has none, from the bytes in the file: the end of `write_skeleton`.

    torch.load does not look at it; `unzip -t` and `check_crc` do.
    """
    path = Path(path)
    with path.open("r+b") as file:
        part = FileRange(file, path, offset, length)
        for record in zip_records(part):
            if record.size and not record.crc:
                write_crc(file, record, part.crc(record.start - offset, record.size))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Stands for a tensor, row-major, in an object to be written."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_skeleton(path: str | PathLike[str], obj: Any, *, offset: int = 0) -> tuple[Any, int]:
    """Writes what torch.save would write for `obj`, with holes where TensorSpecs' bytes belong.

    Returns `obj` with an Extent for each TensorSpec (inside dicts, lists, tuples and Namespaces), and the end of
    the archive in the file. With offset 0 the file is made anew, otherwise the archive is put at `offset` of
    an existing one. A TensorSpec that is written twice is one storage. CRCs of the tensors are left out: `seal`.

    Raises: ValueError when `obj` holds a tensor.
    """
    path = Path(path)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=2)
    pickler.dump(obj)
    extents = {}
    with path.open("r+b" if offset else "wb") as file:
        archive = ZipWriter(file, offset, "archive" if offset else path.stem)
        archive.add("data.pkl", buffer.getvalue())
        archive.add(".format_version", b"1")
        archive.add(".storage_alignment", str(ALIGNMENT).encode())
        archive.add("byteorder", b"little")
        for key, spec in enumerate(pickler.specs):
            extents[id(spec)] = Extent(path, archive.reserve(f"data/{key}", spec.num_bytes), spec.shape, spec.dtype)
        archive.add("version", b"3\n")
        archive.add(".data/serialization_id", f"{0:020d}{zlib.crc32(buffer.getvalue()):020d}".encode())
        end = archive.finish()
    return _with_extents(obj, extents), end


@dataclass(frozen=True, slots=True)
class _Key:
    """Stands for a storage while it is pickled."""

    number: int
    spec: TensorSpec


class _Pickler(pickle.Pickler):
    """Pickles TensorSpecs as torch.save pickles tensors."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.specs: list[TensorSpec] = []
        """Specs by key; one that is written twice is reduced once."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Key):
            return None
        typed = _STORAGE_CLASSES.get(obj.spec.dtype)
        count = math.prod(obj.spec.shape) if typed else obj.spec.num_bytes
        return ("storage", typed or torch.UntypedStorage, str(obj.number), "cpu", count)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            raise ValueError(f"got a tensor of shape {tuple(obj.shape)} to write, expected TensorSpecs; convert it")
        if not isinstance(obj, TensorSpec):
            return NotImplemented
        key = _Key(len(self.specs), obj)
        self.specs.append(obj)
        view: tuple[Any, ...] = (key, 0, tuple(obj.shape), contiguous_strides(tuple(obj.shape)), False, OrderedDict())
        if obj.dtype in _STORAGE_CLASSES:
            return torch._utils._rebuild_tensor_v2, view
        return torch._utils._rebuild_tensor_v3, (*view, obj.dtype)


_STORAGE_CLASSES = {dtype: getattr(torch, name) for name, dtype in STORAGE_DTYPES.items()}


def _with_extents(obj: Any, extents: Mapping[int, Extent]) -> Any:
    if isinstance(obj, TensorSpec):
        return extents[id(obj)]
    if isinstance(obj, dict):
        return type(obj)((key, _with_extents(value, extents)) for key, value in obj.items())
    if isinstance(obj, (list, tuple)):
        return type(obj)(_with_extents(value, extents) for value in obj)
    if isinstance(obj, Namespace):
        return Namespace(**_with_extents(vars(obj), extents))
    return obj
