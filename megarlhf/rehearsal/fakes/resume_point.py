"""Resume points in a rehearsal: made as in a run, but bytes are counted and not written."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device.torch_patches import without_modes
from megarlhf.resume.points.checkpointer import bytes_of
from megarlhf.resume.points.file_digest import FileDigest
from megarlhf.resume.points.point import Point
from megarlhf.resume.points.restore import RANDOM
from megarlhf.resume.points.writer import Content, PointWriter, WriteOutcome, own_items
from megarlhf.runtime import Runtime


@dataclass(frozen=True)
class PointSizes:
    """One rank's part of a resume point."""

    bytes_by_role: dict[str, int]
    """Bytes of each role's file, with the header of each tensor. A role of which the rank has nothing is left out."""
    tensors_by_role: dict[str, int]
    """Tensors in each role's file."""
    tables: int
    """Bytes of tensors in files that only rank 0 writes: responses that are being drawn in slices, and a step's state.
    Every rank holds them in host memory."""
    host_bytes: int
    """Copy in host memory from which the point is written; 0 where the device is the host."""

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_role.values())


class RehearsedWriter(PointWriter):
    """Writer without a separate process: what is written is complete when its state is requested.

    Not counted are metadata, tokenizers and states of a few kilobytes, which only rank 0 writes, and the messages by
    which it learns the plans of all.
    """

    def __init__(self, runtime: Runtime, copied: Callable[[int], None], written: Callable[[PointSizes], None]) -> None:
        """`copied` gets the bytes that are copied to the host, `written` the sizes of a point."""
        super().__init__(runtime)
        self._copied, self._written = copied, written
        self._under_way: PointSizes | None = None

    def to_first(self, value: Any) -> list[Any]:
        """Every rank is taken to hand in the same as this one, and makes what rank 0 writes, so that any can tell its
        size. No message is counted: it would be as long as the longest of all ranks, which no rank knows alone."""
        return [value] * self._runtime.world_size

    @property
    def busy(self) -> bool:
        return self._under_way is not None

    def make_room(self, directory: Path, size: int, spare: Sequence[Point]) -> str | None:
        """There is always room, since nothing is written."""
        return None

    def start(self, directory: Path, content: Content, complete: Callable[[Mapping[str, FileDigest]], None]) -> None:
        sizes, numbers, on_host = {}, {}, 0
        for name, state in content.roles.items():
            own = own_items(state)
            tensors = [item.data for item in own if isinstance(item.data, Tensor)]
            if own:
                numbers[name] = len(tensors)
                sizes[name] = sum(map(saved_bytes, tensors)) + (len(own) - len(tensors)) * _object_bytes()
            if self._runtime.device.type != "cpu":
                on_host += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if on_host:
            self._copied(on_host)
        tables = sum(bytes_of(file) for name, file in content.files.items() if name != RANDOM)
        self._under_way = PointSizes(sizes, numbers, tables, on_host)
        self._written(self._under_way)

    def poll(self, *, wait: bool = False) -> WriteOutcome | None:
        done, self._under_way = self._under_way, None
        return None if done is None else WriteOutcome(None, 0.0, done.nbytes)

    def abandon(self) -> None:
        self._under_way = None


def saved_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in a file, where torch.save writes it with a header of its own. Headers of tensors with equal
    dimensions differ by a few bytes."""
    return tensor.numel() * tensor.element_size() + _header_bytes(tensor.dim(), tensor.dtype)


@functools.cache
def _header_bytes(dimensions: int, dtype: torch.dtype) -> int:
    with without_modes():
        file = io.BytesIO()
        one = torch.zeros((1,) * dimensions, dtype=dtype)
        torch.save(one, file)
        return file.tell() - one.element_size()


@functools.cache
def _object_bytes() -> int:
    """Bytes of an empty entry: TransformerEngine's states, which Megatron-LM expects (`extra_states`)."""
    with without_modes():
        file = io.BytesIO()
        torch.save([None], file)
        return file.tell()
