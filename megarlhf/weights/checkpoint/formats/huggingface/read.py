"""Hugging Face checkpoints on disk: places of the tensors in their files, without reading them."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, canonical_names, logical_tensors
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.torch_file.archive import read_torch_file
from megarlhf.weights.transport.extent import CheckpointWeights, Extent

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Buffers that old checkpoints store and that are computed, not learnt."""
MAX_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""

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


class HFFiles:
    """The tensors of a Hugging Face directory, in safetensors or in older .bin files; only headers are read."""

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Raises: ValueError on missing shards, damaged files, or tensors that are only in the index."""
        self.directory = Path(directory)
        self.tensors: dict[str, Extent] = {}
        """Every stored tensor by its name in the files."""
        for index, single, read in (  # in the order of transformers: a single file wins over an index beside it
            (INDEX, SINGLE, read_header),
            (TORCH_INDEX, TORCH_SINGLE, _read_bin),
        ):
            if (self.directory / single).is_file():
                self.tensors = read(self.directory / single)
                return
            if (self.directory / index).is_file():
                self.tensors = _read_index(self.directory / index, read)
                return
        raise ValueError(
            f"{self.directory} has none of {INDEX}, {SINGLE}, {TORCH_INDEX}, {TORCH_SINGLE}; give a Hugging Face "
            "model directory"
        )

    def weights(self, arch: Architecture, head: Head, *, extra: Collection[str] = ()) -> CheckpointWeights:
        """The logical tensors of the model as placements in these files.

        `extra` may be there unused (a tied model's `lm_head.weight`, say).

        Raises: ValueError, listing every difference, unless the files hold exactly the model's tensors.
        """
        expected = logical_tensors(arch, head)
        names = canonical_names(self.tensors, arch, head)
        self._check(expected, names, extra)
        extents = {names[tensor]: flat(self.tensors[names[tensor]]) for tensor in expected}
        placements = tuple(
            Placement(tensor, Box.whole(shape), names[tensor], 0, _strides(self.tensors[names[tensor]]))
            for tensor, shape in expected.items()
        )
        storages = {name: extent.shape for name, extent in extents.items()}
        part = RankPlacements(0, storages, placements, dict(expected))
        return CheckpointWeights(self.directory, (part,), (extents,))

    def _check(self, expected: Mapping[str, Shape], names: Mapping[str, str], extra: Collection[str]) -> None:
        problems = [f"{name} is missing" for name in expected if name not in names]
        problems += [
            f"{name} has shape {self.tensors[names[name]].shape}, expected {tuple(shape)}"
            for name, shape in expected.items()
            if name in names and self.tensors[names[name]].shape != tuple(shape)
        ]
        used = {names[name] for name in expected if name in names}
        allowed = {*extra, *(names[name] for name in extra if name in names)}
        problems += [
            f"{name} is not part of the model"
            for name in self.tensors
            if name not in used and name not in allowed and not f".{name}".endswith(IGNORED_SUFFIXES)
        ]
        if problems:
            raise ValueError(
                f"{self.directory} differs from what its config.json describes in {len(problems)} tensors: "
                f"{'; '.join(problems)}. Check that config.json and the weights belong together"
            )


def flat(extent: Extent) -> Extent:
    """A strided tensor's bytes from its first element to its last, as a vector; others as they are."""
    if extent.strides is None:
        return extent
    count = (extent.end - extent.offset) // extent.dtype.itemsize
    return Extent(extent.path, extent.offset, (count,), extent.dtype)


def _strides(extent: Extent) -> Shape:
    return contiguous_strides(extent.shape) if extent.strides is None else extent.strides


def _read_index(index: Path, read: Any) -> dict[str, Extent]:
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
        missing_files = [name for name in files if not (index.parent / name).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error!r}); copy it again from its source") from error
    if missing_files:
        raise ValueError(
            f"{index.parent} lacks {len(missing_files)} of {len(files)} shards named in {index.name}: "
            f"{', '.join(missing_files)}; copy them from the source"
        )
    headers = {name: read(index.parent / name) for name in files}
    missing_tensors = [f"{tensor} (in {name})" for tensor, name in file_of.items() if tensor not in headers[name]]
    if missing_tensors:
        raise ValueError(
            f"{index} promises {len(missing_tensors)} tensors that its shards lack: {', '.join(missing_tensors)}; the "
            "directory mixes two checkpoints or is damaged: copy it again"
        )
    unlisted = [f"{tensor} (in {name})" for name in files for tensor in headers[name] if tensor not in file_of]
    if unlisted:
        raise ValueError(
            f"{index} does not list {len(unlisted)} tensors that its shards hold: {', '.join(unlisted)}; the "
            "directory mixes two checkpoints or is damaged: copy it again"
        )
    return {tensor: headers[name][tensor] for tensor, name in file_of.items()}


def _read_bin(path: Path) -> dict[str, Extent]:
    state = read_torch_file(path)
    tensors = {name: value for name, value in state.items() if isinstance(value, Extent)}
    if not tensors:
        raise ValueError(f"{path} holds no state dict of tensors; give the pytorch_model.bin of save_pretrained")
    return tensors


def read_header(path: Path) -> dict[str, Extent]:
    """Place of each tensor of a safetensors file.

    Raises: ValueError when the file is not safetensors, contradicts itself, or is not as long as its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size or length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} ({size} bytes) is truncated or not safetensors; copy it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _extent(path, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no sound safetensors header ({error}); copy it again") from error
    end = 8 + length
    for extent in sorted(tensors.values(), key=lambda extent: (extent.offset, extent.end)):
        if extent.offset != end:
            raise ValueError(f"{path}: its header leaves a gap or an overlap at byte {end}; copy it again")
        end = extent.end
    if end != size:
        raise ValueError(f"{path} has {size} bytes, expected {end} from its header; it is truncated: copy it again")
    return tensors


def _extent(path: Path, base: int, entry: Mapping[str, Any]) -> Extent:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} is not one of {', '.join(DTYPES)}")
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    if any(not isinstance(n, int) or n < 0 for n in (*shape, start, end)):
        raise ValueError(f"shape {shape} or offsets {start}, {end} are not whole numbers")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for {entry['dtype']} of shape {shape}")
    return Extent(path, base + start, shape, dtype)


def is_huggingface(directory: Path) -> bool:
    """Whether the directory holds weights in one of the forms that `HFFiles` reads."""
    return any(os.path.isfile(directory / name) for name in (INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE))
