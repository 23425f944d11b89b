"""Writes a Hugging Face directory tensor by tensor, and copies the small files beside a model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megarlhf.atomic_write import sync
from megarlhf.provenance import FILE as PROVENANCE
from megarlhf.weights.checkpoint.formats.huggingface.write import (
    MAX_SHARD_BYTES,
    Specs,
    num_bytes_of,
    preallocate_huggingface,
)
from megarlhf.weights.checkpoint.formats.megatron.tracker import TRACKER
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import CONFIG
from megarlhf.weights.checkpoint.staging import Staging
from megarlhf.weights.transport.extent import Extent

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp"}
WEIGHT_SUFFIXES |= {".ot", ".tflite", ".npz", ".pb", ".mlmodel", ".pdparams", ".nemo", ".tar", ".zip", ".gz"}
SMALL_BYTES = 200 << 20
"""No tokenizer is larger; what is, are weights of a kind we do not know."""
TEKKEN = "tekken.json"
TEMPLATES = "additional_chat_templates"
"""The one folder of a tokenizer; others beside a model (`original/`, `onnx/`) hold its weights once more."""


class HFWriter:
    """Writes the tensors of a preallocated Hugging Face directory in any order; made by `open_hf_writer`."""

    def __init__(self, places: Mapping[str, Extent]) -> None:
        self.places, self.missing = places, set(places)
        self._written: set[Path] = set()

    @property
    def paths(self) -> set[Path]:
        """The files."""
        return {place.path for place in self.places.values()}

    def sync(self) -> None:
        """Wait until the files of this process are on the disk."""
        for path in self._written:
            sync(path)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, of the dtype and shape promised."""
        place = self.places[name]
        if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, promised {place.shape} {place.dtype}; pass "
                "it whole and cast"
            )
        with place.path.open("r+b") as file:
            file.seek(place.offset)
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self.missing.discard(name)
        self._written.add(place.path)


@contextmanager
def open_hf_writer(
    directory: str | PathLike[str],
    tensors: Specs,
    config: Mapping[str, Any],
    *,
    copy_from: str | PathLike[str] | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Iterator[HFWriter]:
    """A Hugging Face directory that is written tensor by tensor, and appears whole or not at all.

    `tensors`: shape and dtype of all that will be written. `copy_from`: a directory whose other files (tokenizer,
    generation config, licence) are copied. `files`: by name, in place of what is copied.

    Raises: ValueError when the directory exists and is not empty, or when a tensor was not written.
    """
    with Staging(directory) as staging:
        staging.reserve(sum(num_bytes_of(spec) for spec in tensors.values()))
        if copy_from is not None:
            copy_other_files(Path(copy_from), staging.path)
        for name, content in files.items():
            (staging.path / name).parent.mkdir(exist_ok=True)
            (staging.path / name).write_bytes(content)
        writer = HFWriter(preallocate_huggingface(staging.path, tensors, config, max_shard_bytes=max_shard_bytes))
        yield writer
        if writer.missing:
            raise ValueError(
                f"{len(writer.missing)} tensors were promised and not written: "
                f"{', '.join(sorted(writer.missing))}; write them before the block ends"
            )


def copy_other_files(source: Path, destination: Path) -> None:
    """Copies `other_files`."""
    for path in other_files(source):
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def read_other_files(source: Path) -> dict[str, bytes]:
    """The content of `other_files`, by path below the directory."""
    return {str(path.relative_to(source)): path.read_bytes() for path in other_files(source)}


def other_files(source: Path) -> list[Path]:
    """A model directory's small files other than weights, their index, config.json, and where the weights come from:
    the small files may be another model's. Where tokenizer.json or tokenizer.model is there, tekken.json is left out:
    transformers would read it in their place.

    Raises: ValueError for a link that leads nowhere.
    """
    files = []
    elsewhere = any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    for path in sorted((*source.iterdir(), *(source / TEMPLATES).glob("*"))):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json") or ".data-" in path.name
        unread = path.name in ("config.json", TRACKER, CONFIG, PROVENANCE) or (elsewhere and path.name == TEKKEN)
        if weights or unread or path.name.startswith("."):
            continue
        if not path.exists():
            raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist; download it, or remove it")
        if path.is_file() and path.stat().st_size <= SMALL_BYTES:
            files.append(path)
    return files
