"""The numbers of a GGUF file's tensors, some rows at a time: whole numbers in blocks become fp32, floats stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tools.gguf_to_hf.header import GGUFFile, StoredTensor

FLOATS: dict[int, tuple[str, torch.dtype]] = {
    0: ("F32", torch.float32),
    1: ("F16", torch.float16),
    30: ("BF16", torch.bfloat16),
}
"""ggml's types that are floats as they stand, by number."""

Rows = slice | np.ndarray
"""Which rows of a tensor, seen as a matrix of rows as long as its last dim."""


@dataclass(frozen=True)
class NumberType:
    """How ggml stores numbers: in blocks of `elements`, each of `num_bytes`."""

    name: str
    elements: int
    num_bytes: int
    dequantizer: Any = None
    """gguf's number of it; None for floats."""

    def row_bytes(self, row: int) -> int:
        return row // self.elements * self.num_bytes


class Numbers:
    """The tensors' numbers, mapped from the file."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises: ValueError for types that cannot be read, and tensors that the file ends before or that overlap."""
        self.file = file
        self.types = number_types(file)
        self._require_sound()
        self._bytes = np.memmap(file.path, np.uint8, mode="r")

    def type_names(self) -> str:
        """Those that occur, the one of the most bytes first: `Q4_1, F32`."""
        sizes = dict.fromkeys(self.types, 0)
        for tensor in self.file.tensors.values():
            sizes[tensor.type] += self._num_bytes(tensor)
        return ", ".join(self.types[n].name for n in sorted(sizes, key=lambda n: -sizes[n]))

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, [rows, bytes of a row]; mapped."""
        tensor = self.file.tensors[name]
        num_bytes = self._num_bytes(tensor)
        rows = num_bytes // self.types[tensor.type].row_bytes(tensor.shape[-1])
        return self._bytes[tensor.offset : tensor.offset + num_bytes].reshape(rows, -1)

    def rows(self, name: str, rows: Rows) -> torch.Tensor:
        """These rows, [rows, last dim]: in the file's dtype if that is a float, otherwise in fp32."""
        raw, type_ = self.raw(name)[rows], self.file.tensors[name].type
        if type_ in FLOATS:
            return torch.from_numpy(np.array(raw)).view(FLOATS[type_][1])
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # what is not finite is said with the tensor's name
            return torch.from_numpy(np.ascontiguousarray(dequantize(raw, self.types[type_].dequantizer)))

    def _num_bytes(self, tensor: StoredTensor) -> int:
        *outer, row = tensor.shape
        return int(np.prod(outer, dtype=object)) * self.types[tensor.type].row_bytes(row)

    def _require_sound(self) -> None:
        path, end, before = self.file.path, 0, "its header"
        for tensor in sorted(self.file.tensors.values(), key=lambda tensor: tensor.offset):
            type_ = self.types[tensor.type]
            if tensor.shape[-1] % type_.elements:
                raise ValueError(
                    f"{path}: {tensor.name} has rows of {tensor.shape[-1]}, not a multiple of {type_.name}'s blocks of "
                    f"{type_.elements}; it is damaged: copy it again"
                )
            if tensor.offset < end:
                raise ValueError(f"{path}: {tensor.name} overlaps {before}; it is damaged: copy it again")
            end, before = tensor.offset + self._num_bytes(tensor), tensor.name
            if end > self.file.size:
                raise ValueError(
                    f"{path} ends at byte {self.file.size}, expected {end} for {tensor.name}; it is truncated: copy it "
                    "again"
                )


def number_types(file: GGUFFile) -> dict[int, NumberType]:
    """The types of the file's tensors.

    Raises: ValueError for one that is unknown or cannot be turned into floats, and where gguf is needed and missing.
    """
    used = sorted({tensor.type for tensor in file.tensors.values()})
    types = {n: NumberType(name, 1, dtype.itemsize) for n, (name, dtype) in FLOATS.items() if n in used}
    if quantized := [n for n in used if n not in FLOATS]:
        types |= _quantized(file, quantized)
    return types


def _quantized(file: GGUFFile, numbers: Sequence[int]) -> dict[int, NumberType]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ValueError(
            f"{file.path} has quantized tensors (ggml's types {', '.join(map(str, numbers))}), which are read with the "
            f"package gguf ({error}): pip install 'megarlhf[gguf]'"
        ) from error
    types = {}
    for number in numbers:
        try:
            named = GGMLQuantizationType(number)
            elements, num_bytes = GGML_QUANT_SIZES[named]
            dequantize(np.zeros((1, num_bytes), np.uint8), named)
        except (ValueError, KeyError, NotImplementedError) as error:
            tensors = [tensor.name for tensor in file.tensors.values() if tensor.type == number]
            raise ValueError(
                f"{file.path} stores {len(tensors)} tensors ({tensors[0]}, ...) in ggml's type {number}, which the "
                f"installed gguf does not turn into floats ({error}); use a file of another type, or a newer gguf"
            ) from error
        types[number] = NumberType(named.name, elements, num_bytes, named)
    return types
