"""Writes a Hugging Face directory tensor by tensor, and copies the small files beside a model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megarlhf.weights.checkpoint.formats.huggingface.write import (
    MAX_SHARD_BYTES,
    Specs,
    num_bytes_of,
    preallocate_huggingface,
)
from megarlhf.weights.checkpoint.formats.megatron.tracker import TRACKER
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import CONFIG
from megarlhf.weights.checkpoint.staging import Staging

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp"}
WEIGHT_SUFFIXES |= {".ot", ".tflite", ".npz", ".pb", ".mlmodel", ".pdparams", ".nemo", ".tar", ".zip", ".gz"}
SMALL_BYTES = 200 << 20
"""No tokenizer is larger; what is, are weights of a kind we do not know."""
TEMPLATES = "additional_chat_templates"
"""The one folder of a tokenizer; others beside a model (`original/`, `onnx/`) hold its weights once more."""


class HFWriter:
    """Writes a Hugging Face directory tensor by tensor, in any order; appears whole or not at all."""

    def __init__(
        self,
        directory: str | PathLike[str],
        tensors: Specs,
        config: Mapping[str, Any],
        *,
        copy_from: str | PathLike[str] | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """`tensors`: shape and dtype of all that will be written. `copy_from`: a directory whose other files
        (tokenizer, generation config, licence) are copied.

        Raises: ValueError when the directory exists and is not empty.
        """
        self._staging = Staging(directory)
        self._tensors, self._config = dict(tensors), dict(config)
        self._copy_from = None if copy_from is None else Path(copy_from)
        self._max_shard_bytes = max_shard_bytes
        self._missing = set(tensors)

    def __enter__(self) -> HFWriter:
        self._staging.__enter__()
        try:
            self._staging.reserve(sum(num_bytes_of(spec) for spec in self._tensors.values()))
            if self._copy_from is not None:
                copy_other_files(self._copy_from, self._staging.path)
            self._places = preallocate_huggingface(
                self._staging.path, self._tensors, self._config, max_shard_bytes=self._max_shard_bytes
            )
        except BaseException as error:
            self._staging.__exit__(type(error), error, None)
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
        with place.path.open("r+b") as file:
            file.seek(place.offset)
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._missing:
            error_of_missing = ValueError(
                f"{len(self._missing)} tensors were promised and not written: "
                f"{', '.join(sorted(self._missing))}; write them before the block ends"
            )
            self._staging.__exit__(ValueError, error_of_missing, None)
            raise error_of_missing
        self._staging.__exit__(kind, error, trace)


def copy_other_files(source: Path, destination: Path) -> None:
    """Copies `other_files`."""
    for path in other_files(source):
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def other_files(source: Path) -> list[Path]:
    """A model directory's small files other than weights, their index and config.json.

    Raises: ValueError for a link that leads nowhere.
    """
    files = []
    for path in sorted((*source.iterdir(), *(source / TEMPLATES).glob("*"))):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json") or ".data-" in path.name
        if weights or path.name in ("config.json", TRACKER, CONFIG) or path.name.startswith("."):
            continue
        if not path.exists():
            raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist; download it, or remove it")
        if path.is_file() and path.stat().st_size <= SMALL_BYTES:
            files.append(path)
    return files
