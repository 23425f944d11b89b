"""Metadata of checkpoints in `.distcp` files: global tensors, their shards, and the blob of each shard.

`.metadata` pickles a `torch.distributed.checkpoint.metadata.Metadata`. Each shard of a tensor is a blob, a file
of torch.save inside a `.distcp` file. Read here without torch.distributed, Megatron or any tensor's bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from megarlhf.placement import Box, Shape
from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from megarlhf.weights.checkpoint.formats.torch_file.unpickle import ALLOWED, INERT, InertObject, unpickle
from megarlhf.weights.transport.extent import Extent

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"
"""Object with the content of `common.pt`, which Megatron-Core has not written since 0.19."""

_ALLOWED = {**ALLOWED, ("torch.serialization", "_get_layout"): INERT}
_INERT = (
    "torch.distributed.checkpoint",
    "torch.distributed._shard",  # TensorProperties, before torch 2.3
    "torch.distributed._checkpoint",
    "megatron.core.dist_checkpointing",
)
"""Modules whose classes `.metadata` may name: dataclasses and enums, read as records."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Blob:
    """A range of a file that is a file of torch.save."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A box of a global tensor, which torch calls a chunk, and its blob."""

    box: Box
    blob: Blob


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    shape: Shape
    dtype: torch.dtype
    shards: tuple[SavedShard, ...]


@dataclass(frozen=True, slots=True)
class SavedState:
    """Content of `.metadata`: tensors and other objects by key, optimizer state included."""

    tensors: dict[str, GlobalTensor]
    objects: dict[str, Blob]


def read_tensors(directory: Path) -> dict[str, GlobalTensor]:
    """The tensors of `read_metadata`."""
    return read_metadata(directory).tensors


def read_metadata(directory: Path) -> SavedState:
    """Reads the places of everything in the checkpoint.

    Raises: ValueError when `.metadata` is missing, damaged or names another class, or a file is missing or too
    short, or shards do not fill a tensor.
    """
    path = directory / METADATA
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}), and it says where the tensors in the .distcp files are: the "
            "save was not finished, or the file was not copied along; take another iteration, or copy the file"
        ) from error
    pickled = unpickle(raw, allowed=_ALLOWED, inert=_INERT, source=str(path))
    try:
        fields = _state(pickled, "Metadata")
        blobs = {}
        for record, info in fields["storage_data"].items():  # of tensors and of other objects
            index = _state(record, "MetadataIndex")
            blobs[index["fqn"], _shape(index.get("offset") or ())] = _blob(directory, info)
        described = fields["state_dict_metadata"].items()
        tensors = {
            _is(str, key): _tensor(key, record, blobs)
            for key, record in described
            if _kind(record) == "TensorStorageMetadata"
        }
        objects = {
            _is(str, key): blobs[key, ()]
            for key, record in described
            if _kind(record) == "BytesStorageMetadata" and (key, ()) in blobs
        }
    except (AttributeError, KeyError, TypeError, IndexError, AssertionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}), expected the metadata of "
            "torch.distributed.checkpoint; copy it again from its source"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} {error}; the directory is damaged or incomplete: copy it again") from error
    _check_files(path, set(blobs.values()))
    return SavedState(tensors, objects)


def _blob(directory: Path, record: InertObject) -> Blob:
    info = _state(record, "_StorageInfo")
    name = _is(str, info["relative_path"])
    if info.get("transform_descriptors"):
        raise ValueError(f"says that {name} is stored through {info['transform_descriptors']}, expected plain bytes")
    if Path(name).name != name:
        raise ValueError(f"names the file {name!r}, expected one in the checkpoint's directory")
    offset, length = _shape((info["offset"], info["length"]))
    return Blob(directory / name, offset, length)


def _tensor(key: str, record: InertObject, blobs: Mapping[tuple[str, Shape], Blob]) -> GlobalTensor:
    fields = _state(record, "TensorStorageMetadata")
    shape = _shape(fields["size"])
    properties = fields["properties"].state
    dtype = _is(torch.dtype, properties["dtype"] if isinstance(properties, dict) else properties[0])
    shards = []
    for chunk in fields["chunks"]:
        offsets, sizes = (_shape(_state(chunk, "ChunkStorageMetadata")[name]) for name in ("offsets", "sizes"))
        if 0 in sizes:  # a rank of FSDP that has none of the rows
            continue
        box = Box(offsets, tuple(a + n for a, n in zip(offsets, sizes, strict=True)))
        if any(b > size for b, size in zip(box.stop, shape, strict=True)):
            raise ValueError(f"has a chunk of {key} at {offsets} of shape {sizes}, outside the tensor's {shape}")
        if (key, offsets) not in blobs:
            raise ValueError(f"does not say where the chunk of {key} at {offsets} is")
        shards.append(SavedShard(box, blobs[key, offsets]))
    numel, expected = sum(shard.box.numel for shard in shards), math.prod(shape)
    if numel != expected or len({shard.box.start for shard in shards}) != len(shards):
        raise ValueError(f"has chunks of {key} with {numel} elements, expected {expected}, each once")
    return GlobalTensor(shape, dtype, tuple(shards))


def _check_files(metadata: Path, blobs: Iterable[Blob]) -> None:
    ends: dict[Path, int] = {}
    for blob in blobs:
        ends[blob.path] = max(ends.get(blob.path, 0), blob.offset + blob.length)
    missing = sorted(path.name for path in ends if not path.is_file())
    if missing:
        raise ValueError(
            f"{metadata.parent} lacks {len(missing)} of {len(ends)} files named in {metadata.name}: "
            f"{', '.join(missing)}; copy them from the source"
        )
    for path, end in ends.items():
        if path.stat().st_size < end:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {end}; it is truncated: copy it again")


def require_apart(directory: Path, tensors: Iterable[GlobalTensor]) -> None:
    """Two shards never share bytes: a damaged file name or offset may point at another shard's blob.

    Raises: ValueError when two do.
    """
    blobs = (shard.blob for tensor in tensors for shard in tensor.shards)
    ordered = sorted(blobs, key=lambda blob: (blob.path, blob.offset))
    for first, second in pairwise(ordered):
        if first.path == second.path and first.offset + first.length > second.offset:
            raise ValueError(
                f"{directory / METADATA} says that two chunks begin at byte {second.offset} of {first.path.name}; it "
                "is damaged: copy the checkpoint again"
            )


def _kind(record: Any) -> str:
    return type(record).__qualname__


def _state(record: Any, kind: str) -> dict[str, Any]:
    if _kind(record) != kind or not isinstance(record.state, dict):
        raise TypeError(f"a {_kind(record)} is where a {kind} belongs")
    return record.state


def _is(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} is where a {kind.__name__} belongs")
    return value


def _shape(sizes: Any) -> Shape:
    shape = tuple(sizes)
    if any(type(n) is not int or n < 0 for n in shape):
        raise TypeError(f"sizes or offsets are {shape}")
    return shape


def read_extents(shards: Mapping[str, tuple[SavedShard, torch.dtype]]) -> dict[str, Extent]:
    """Place of the tensor of each named shard.

    Blobs of one dtype, shape and length mostly have the same header: the first is read in full, the others are
    compared with it and read in full only when they differ.

    Raises: ValueError when a blob is damaged, or holds something else than the metadata says.
    """
    extents: dict[str, Extent] = {}
    headers: dict[tuple[torch.dtype, Shape, int], bytes] = {}
    by_path: dict[Path, list[str]] = {}
    for name, (shard, _) in shards.items():
        by_path.setdefault(shard.blob.path, []).append(name)
    for path, names in by_path.items():
        with path.open("rb") as file:
            for name in names:
                (shard, dtype), offset = shards[name], shards[name][0].blob.offset
                kind = (dtype, shard.box.shape, shard.blob.length)
                header = headers.get(kind)
                if header is not None and _without_crc(os.pread(file.fileno(), len(header), offset)) == header:
                    extents[name] = Extent(path, offset + len(header), shard.box.shape, dtype)
                    continue
                extents[name] = _read_extent(shard.blob, shard.box.shape, dtype)
                headers[kind] = _without_crc(os.pread(file.fileno(), extents[name].offset - offset, offset))
    return {name: extents[name] for name in shards}


def _read_extent(blob: Blob, shape: Shape, dtype: torch.dtype) -> Extent:
    extent = read_torch_file(blob.path, offset=blob.offset, length=blob.length)
    if not isinstance(extent, Extent) or (extent.shape, extent.dtype) != (shape, dtype):
        raise ValueError(
            f"{blob.path} holds {extent} at byte {blob.offset}, expected a tensor of shape {shape} and {dtype} "
            f"by {METADATA}; the files do not belong together: copy the checkpoint again"
        )
    if extent.strides is not None:
        raise ValueError(
            f"{blob.path} holds a tensor with strides {extent.strides} at byte {blob.offset}, expected row-major "
            "as Megatron saves; save the checkpoint again with contiguous tensors"
        )
    return extent


def _without_crc(header: bytes) -> bytes:
    """A blob up to its tensor's bytes, without their CRC, which is in the last local header."""
    crc = header.rfind(b"PK\x03\x04") + 14
    return header[:crc] + bytes(4) + header[crc + 4 :]
