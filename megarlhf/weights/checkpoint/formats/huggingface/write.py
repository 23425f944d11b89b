"""Preallocates a Hugging Face directory: safetensors at full length, with holes where the tensors' bytes belong."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarlhf.placement import Shape
from megarlhf.weights.checkpoint.formats.huggingface.read import DTYPES, INDEX, SINGLE
from megarlhf.weights.transport.extent import Extent

MAX_SHARD_BYTES = 5 << 30

_CODES = {dtype: code for code, dtype in DTYPES.items()}

Specs = Mapping[str, tuple[Shape, torch.dtype]]


def preallocate_huggingface(
    directory: Path, tensors: Specs, config: Mapping[str, Any], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, Extent]:
    """config.json, the index, and shards at full length in which every tensor is still a hole; each one's place."""
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shards = split_by_bytes(tensors, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(num_bytes_of(spec) for spec in tensors.values())},
            "weight_map": {t: name for name, shard in zip(names, shards, strict=True) for t in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    places: dict[str, Extent] = {}
    for name, shard in zip(names, shards, strict=True):
        places.update(_begin_shard(directory / name, {tensor: tensors[tensor] for tensor in shard}))
    return places


def _begin_shard(path: Path, tensors: Specs) -> dict[str, Extent]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, dtype) in tensors.items():
        end = at + num_bytes_of((shape, dtype))
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(start + at)
    return {
        name: Extent(path, start + header[name]["data_offsets"][0], shape, dtype)
        for name, (shape, dtype) in tensors.items()
    }


def num_bytes_of(spec: tuple[Shape, torch.dtype]) -> int:
    return math.prod(spec[0]) * spec[1].itemsize


def split_by_bytes(tensors: Specs, limit: int) -> list[list[str]]:
    """Names in order, in lists of at most `limit` bytes; a tensor above the limit has a list of its own."""
    lists: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if lists[-1] and size + num_bytes_of(spec) > limit:
            lists.append([])
            size = 0
        lists[-1].append(name)
        size += num_bytes_of(spec)
    return lists
