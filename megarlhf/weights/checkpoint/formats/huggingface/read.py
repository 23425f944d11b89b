"""Hugging Face checkpoints on disk: places of the tensors in their files, without reading them."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, canonical_names, logical_tensors
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.checkpoint.formats.huggingface.names import single_experts, without_wrappers
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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_QUANTISED = (
    "they are values of a quantised model, which is not read here, and not the model's own; use the version in bf16 "
    "(publishers mostly have one beside it), or write the model back to bf16 with the program that quantised it"
)
MOST_NAMED = 12
"""Differences of a kind that a message lists."""


class HFFiles:
    """The tensors of a Hugging Face directory, in safetensors or in older .bin files; only headers are read."""

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Raises: ValueError on missing shards, damaged files, or tensors that are only in the index."""
        self.directory = Path(directory)
        self.tensors = without_wrappers(self.directory, _read_directory(self.directory))
        """Every stored tensor by its name in the files, without what wrappers such as DDP put before every name."""

    def weights(self, arch: Architecture, head: Head, *, extra: Collection[str] = ()) -> CheckpointWeights:
        """The logical tensors of the model as placements in these files.

        `extra` may be there unused (a tied model's `lm_head.weight`, say).

        Raises: ValueError, listing differences of every kind, unless the files hold exactly the model's tensors.
        """
        expected, tensors = logical_tensors(arch, head), single_experts(self.tensors, arch)
        names = canonical_names(tensors, arch, head)
        self._check(expected, tensors, names, extra)
        extents = {names[tensor]: flat(tensors[names[tensor]]) for tensor in expected}
        placements = tuple(
            Placement(tensor, Box.whole(shape), names[tensor], 0, _strides(tensors[names[tensor]]))
            for tensor, shape in expected.items()
        )
        storages = {name: extent.shape for name, extent in extents.items()}
        part = RankPlacements(0, storages, placements, dict(expected))
        return CheckpointWeights(self.directory, (part,), (extents,))

    def _check(
        self,
        expected: Mapping[str, Shape],
        tensors: Mapping[str, Extent],
        names: Mapping[str, str],
        extra: Collection[str],
    ) -> None:
        used = {names[name] for name in expected if name in names}
        not_values = [name for name, extent in tensors.items() if _is_quantised(extent.dtype) and not _is_buffer(name)]
        if of_model := [name for name in not_values if name in used]:
            dtypes = sorted({str(tensors[name].dtype).removeprefix("torch.") for name in of_model})
            raise ValueError(
                f"{self.directory} stores {len(of_model)} of the model's {len(expected)} tensors in "
                f"{', '.join(dtypes)} ({of_model[0]}, ...): {_QUANTISED}"
            )
        missing = [f"{name} is missing" for name in expected if name not in names]
        other_shapes = [
            f"{name} has shape {tensors[names[name]].shape}, expected {tuple(shape)}"
            for name, shape in expected.items()
            if name in names and tensors[names[name]].shape != tuple(shape)
        ]
        allowed = {*extra, *(names[name] for name in extra if name in names)}
        surplus = [
            f"{name} is not part of the model"
            for name in tensors
            if name not in used and name not in allowed and not _is_buffer(name)
        ]
        if missing or other_shapes or surplus:
            dtype = str(tensors[not_values[0]].dtype).removeprefix("torch.") if not_values else ""
            why = f"It has tensors in {dtype}: {_QUANTISED}" if dtype else ""
            raise ValueError(
                f"{self.directory} differs from what its config.json describes in "
                f"{len(missing) + len(other_shapes) + len(surplus)} tensors: "
                f"{'; '.join(text for kind in (missing, other_shapes, surplus) for text in _first(kind))}. "
                f"{why or 'Check that config.json and the weights belong together'}"
            )


def _first(differences: list[str]) -> list[str]:
    more = len(differences) - MOST_NAMED
    return differences if more <= 0 else [*differences[:MOST_NAMED], f"and {more} more of these"]


def _is_buffer(name: str) -> bool:
    return f".{name}".endswith(IGNORED_SUFFIXES)


def _is_quantised(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype.itemsize == 1


def flat(extent: Extent) -> Extent:
    """A strided tensor's bytes from its first element to its last, as a vector; others as they are."""
    if extent.strides is None:
        return extent
    count = (extent.end - extent.offset) // extent.dtype.itemsize
    return Extent(extent.path, extent.offset, (count,), extent.dtype)


def _strides(extent: Extent) -> Shape:
    return contiguous_strides(extent.shape) if extent.strides is None else extent.strides


def _read_directory(directory: Path) -> dict[str, Extent]:
    """Read the tensors in the order of transformers: safetensors first, and a single file before an index."""
    for single, index, read in ((SINGLE, INDEX, read_header), (TORCH_SINGLE, TORCH_INDEX, _read_bin)):
        if (directory / single).is_file():
            return read(directory / single)
        if (directory / index).is_file():
            return _read_index(directory / index, read)
    for single, read in ((SINGLE, read_header), (TORCH_SINGLE, _read_bin)):
        if shards := _shards(directory, single):
            return _read_shards(directory, shards, read)
    raise ValueError(
        f"{directory} has none of {INDEX}, {SINGLE}, {TORCH_INDEX}, {TORCH_SINGLE}; give a Hugging Face model directory"
    )


def _shards(directory: Path, single: str) -> list[str]:
    """Names of the files `model-00001-of-00002.safetensors`, ... in the directory, in order."""
    stem, _, suffix = single.partition(".")
    name = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}")
    return sorted(path.name for path in directory.glob(f"{stem}-*.{suffix}") if name.fullmatch(path.name))


def _read_shards(directory: Path, shards: list[str], read: Any) -> dict[str, Extent]:
    """All tensors of shards that have lost their index."""
    stem, _, total = shards[0].partition(".")[0].rpartition("-of-")
    whole = [f"{stem[:-5]}{number:05d}-of-{total}{Path(shards[0]).suffix}" for number in range(1, int(total) + 1)]
    if missing := [name for name in whole if name not in shards]:
        raise ValueError(
            f"{directory} has no index and lacks {len(missing)} of {len(whole)} shards: {', '.join(missing)}; copy "
            "them from the source"
        )
    if others := [name for name in shards if name not in whole]:
        raise ValueError(
            f"{directory} has no index, and shards of two sets: {shards[0]} and {others[0]}; remove those of one set"
        )
    tensors: dict[str, Extent] = {}
    for name in shards:
        for tensor, extent in read(directory / name).items():
            if tensor in tensors:
                raise ValueError(
                    f"{directory}: {tensor} is in {tensors[tensor].path.name} and in {name}, and there is no index; "
                    "the directory mixes two checkpoints: copy one again"
                )
            tensors[tensor] = extent
    return tensors


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
    unlisted = [
        f"{tensor} (in {name})"
        for name in files
        for tensor in headers[name]
        if tensor not in file_of and not _is_buffer(tensor)
    ]
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
        except _UnreadDtypeError as error:
            raise ValueError(f"{path} has tensors of {error}: {_QUANTISED}") from None
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


class _UnreadDtypeError(ValueError):
    """A dtype that torch has no tensors of, such as packed numbers of four bits."""


def _extent(path: Path, base: int, entry: Mapping[str, Any]) -> Extent:
    if entry["dtype"] not in DTYPES:
        raise _UnreadDtypeError(f"dtype {entry['dtype']!r}, expected one of {', '.join(DTYPES)}")
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    if any(not isinstance(n, int) or n < 0 for n in (*shape, start, end)):
        raise ValueError(f"shape {shape} or offsets {start}, {end} are not whole numbers")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for {entry['dtype']} of shape {shape}")
    return Extent(path, base + start, shape, dtype)


def is_huggingface(directory: Path) -> bool:
    """Whether the directory holds weights in one of the forms that `HFFiles` reads.

    Raises: ValueError for other forms of weights that belong to Hugging Face models, and what to give instead.
    """
    if any((directory / name).is_file() for name in (INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE)):
        return True
    if _shards(directory, SINGLE) or _shards(directory, TORCH_SINGLE):
        return True
    if adapters := sorted(directory.glob("adapter_model.*")):
        raise ValueError(
            f"{directory} is a PEFT adapter ({adapters[0].name}) and no model: give the model that it is on, and it as "
            "lora.path; to convert the two, merge them first (PEFT's merge_and_unload, then save_pretrained)"
        )
    if own := sorted(directory.glob("consolidated*.safetensors")):
        raise ValueError(
            f"{directory} has weights in Mistral's own format alone ({own[0].name}); give a directory with the model "
            f"in Hugging Face's ({SINGLE}, or shards of it), which its publisher mostly has too"
        )
    return False
