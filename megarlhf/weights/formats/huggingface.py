"""Hugging Face checkpoints on disk: a reader of boxes and a crash-safe, streaming writer of safetensors."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from megarlhf.weights.placement import Box, Shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Buffers that old checkpoints store and that are computed, not learnt."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a safetensors header says of a tensor."""

    shape: Shape
    dtype: str
    """safetensors' code, BF16 for instance."""
    path: Path


class HFReader:
    """Reads boxes of the tensors of a Hugging Face directory; opening it reads headers only."""

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Raises: ValueError on missing shards, truncated files, or tensors that are only in the index."""
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        """Every stored tensor by name."""
        self._handles: dict[Path, Any] = {}
        single, index = self.directory / SINGLE, self.directory / INDEX
        if index.is_file():
            self._read_index(index)
        elif single.is_file():
            self.tensors.update(read_header(single))
        else:
            raise ValueError(
                f"{self.directory} has neither {INDEX} nor {SINGLE}; give a Hugging Face model directory "
                "with safetensors (convert older .bin files with save_pretrained)"
            )

    def shape(self, tensor: str) -> Shape:
        return self._stored(tensor).shape

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The box, in the stored dtype, on CPU; nothing else of the tensor is read."""
        stored = self._stored(tensor)
        if stored.path not in self._handles:
            self._handles[stored.path] = safe_open(stored.path, framework="pt", device="cpu")
        part = self._handles[stored.path].get_slice(tensor)
        return part[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]

    def check(
        self, expected: Mapping[str, Shape], *, absent: Collection[str] = (), extra: Collection[str] = ()
    ) -> None:
        """Raises ValueError, listing every difference, unless the files hold exactly the expected tensors.

        `absent` may be missing (a fresh score head), `extra` may be there unused (a tied model's
        `lm_head.weight`, the head of the language model from which a reward model starts).
        """
        problems = [f"{n} is missing" for n in expected if n not in self.tensors and n not in absent]
        problems += [
            f"{name} has shape {self.tensors[name].shape}, expected {tuple(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != tuple(shape)
        ]
        problems += [
            f"{name} is not part of the model"
            for name in self.tensors
            if name not in expected and name not in extra and not name.endswith(IGNORED_SUFFIXES)
        ]
        if problems:
            raise ValueError(
                f"{self.directory} differs from what its config.json describes in {len(problems)} tensors: "
                f"{'; '.join(problems)}. Check that config.json and the weights belong together"
            )

    def _stored(self, tensor: str) -> StoredTensor:
        if tensor not in self.tensors:
            raise ValueError(
                f"{self.directory} has no tensor {tensor} (it has {len(self.tensors)}); is this the "
                "checkpoint of the configured model?"
            )
        return self.tensors[tensor]

    def _read_index(self, index: Path) -> None:
        try:
            where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{index} is damaged ({error!r}); copy it again from its source") from error
        files = sorted(set(where.values()))
        lost = [name for name in files if not (self.directory / name).is_file()]
        if lost:
            raise ValueError(
                f"{self.directory} lacks {len(lost)} of {len(files)} shards named in {INDEX}: "
                f"{', '.join(lost)}; copy them from the source"
            )
        headers = {name: read_header(self.directory / name) for name in files}
        vain = [f"{tensor} (in {name})" for tensor, name in where.items() if tensor not in headers[name]]
        if vain:
            raise ValueError(
                f"{index} promises {len(vain)} tensors that its shards lack: {', '.join(vain)}; the "
                "directory mixes two checkpoints or is damaged: copy it again"
            )
        self.tensors.update({tensor: headers[name][tensor] for tensor, name in where.items()})


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes in a safetensors file.

    Raises: ValueError when the file is not safetensors, or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} ({size} bytes) is truncated or not safetensors; copy it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} has no safetensors header ({error}); copy it again") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise ValueError(f"{path} has {size} bytes, expected {end} from its header; it is truncated: copy it again")
    return {name: StoredTensor(tuple(e["shape"]), e["dtype"], path) for name, e in header.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes go."""

    path: Path
    offset: int
    shape: Shape
    dtype: torch.dtype


class HFWriter:
    """Writes a Hugging Face directory tensor by tensor, in any order; appears whole or not at all.

    Everything goes to a hidden sibling directory, is synced, and is renamed when the `with` block ends well;
    when it raises, the sibling is removed.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        tensors: Mapping[str, tuple[Shape, torch.dtype]],
        config: Mapping[str, Any],
        *,
        copy_from: str | PathLike[str] | None = None,
        max_shard_bytes: int = 5 << 30,
    ) -> None:
        """`tensors`: shape and dtype of all that will be written. `copy_from`: a directory whose other files
        (tokenizer, generation config, licence) are copied.

        Raises: ValueError when the directory exists and is not empty.
        """
        self.directory = Path(directory)
        if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise ValueError(f"{self.directory} exists already; remove it or write to another directory")
        self._tensors = dict(tensors)
        self._config = dict(config)
        self._copy_from = None if copy_from is None else Path(copy_from)
        self._max_shard_bytes = max_shard_bytes
        self._places: dict[str, _Place] = {}
        self._files: dict[Path, BinaryIO] = {}
        self._missing = set(tensors)

    def __enter__(self) -> HFWriter:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix=f".{self.directory.name}.", dir=self.directory.parent))
        try:
            self._begin()
        except BaseException:
            self._abandon()
            raise
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, of the dtype and shape promised."""
        place = self._places[name]
        if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, promised {place.shape} {place.dtype}; pass "
                "it whole and cast"
            )
        file = self._files[place.path]
        file.seek(place.offset)
        file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._abandon()

    def _begin(self) -> None:
        if self._copy_from is not None:
            copy_other_files(self._copy_from, self._temporary)
        (self._temporary / "config.json").write_text(json.dumps(self._config, indent=2) + "\n")
        shards = _shards(self._tensors, self._max_shard_bytes)
        names = [SINGLE]
        if len(shards) > 1:
            names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
            index = {
                "metadata": {"total_size": sum(_bytes(spec) for spec in self._tensors.values())},
                "weight_map": {t: name for name, shard in zip(names, shards, strict=True) for t in shard},
            }
            (self._temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, shard in zip(names, shards, strict=True):
            self._begin_shard(self._temporary / name, shard)

    def _begin_shard(self, path: Path, shard: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in shard:
            shape, dtype = self._tensors[name]
            end = at + _bytes(self._tensors[name])
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = path.open("wb")
        self._files[path] = file
        file.write(struct.pack("<Q", len(text)) + text)
        start = 8 + len(text)
        file.truncate(start + at)
        for name in shard:
            offset = start + header[name]["data_offsets"][0]
            self._places[name] = _Place(path, offset, *self._tensors[name])

    def _finish(self) -> None:
        if self._missing:
            raise ValueError(
                f"{len(self._missing)} tensors were promised and not written: "
                f"{', '.join(sorted(self._missing))}; write them before the block ends"
            )
        for file in self._files.values():
            file.close()
        os.chmod(self._temporary, 0o777 & ~_umask())
        for path in self._temporary.iterdir():
            _sync(path)
        _sync(self._temporary)
        os.rename(self._temporary, self.directory)
        _sync(self.directory.parent)

    def _abandon(self) -> None:
        for file in self._files.values():
            file.close()
        if self._temporary.exists():
            shutil.rmtree(self._temporary)


def copy_other_files(source: Path, destination: Path) -> None:
    """Copies a model directory's files other than weights, their index and config.json."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json" and not path.name.startswith("."):
            shutil.copyfile(path, destination / path.name)


def _bytes(spec: tuple[Shape, torch.dtype]) -> int:
    return math.prod(spec[0]) * spec[1].itemsize


def _shards(tensors: Mapping[str, tuple[Shape, torch.dtype]], limit: int) -> list[list[str]]:
    """Names by shard, in order; a tensor above the limit has a shard of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + _bytes(spec) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(spec)
    return shards


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
