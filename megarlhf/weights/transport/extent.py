"""Tensors as ranges of bytes in files, mapped and not loaded: what every format on disk comes down to."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf.placement import Placement, RankPlacements, Shape, contiguous_strides


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor in a file: little-endian elements from a byte offset on."""

    path: Path
    offset: int
    """Bytes from the start of the file to the first element."""
    shape: Shape
    dtype: torch.dtype
    strides: Shape | None = None
    """Strides in elements; None: row-major without gaps."""

    def __setstate__(self, state: object) -> None:
        """Never called by us: else a pickle that is read could make an extent of any file."""
        raise TypeError("an Extent takes no state from a pickle")

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Bytes from the start of the file to behind the last element."""
        if not self.numel:
            return self.offset
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        last = sum((size - 1) * step for size, step in zip(self.shape, strides, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize


class MappedFiles:
    """Private maps of files, made on demand: their pages are the kernel's cache, not this process's memory."""

    def __init__(self) -> None:
        self._maps: dict[Path, memoryview] = {}

    def _bytes(self, path: Path) -> memoryview:
        if path not in self._maps:
            size = path.stat().st_size
            # torch's map, for Python's keeps a descriptor open for each file. Private: nothing is written back.
            storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
            raw = (ctypes.c_ubyte * size).from_address(storage.data_ptr())
            raw.storage = storage  # type: ignore[attr-defined]  # lives as long as any view of it
            self._maps[path] = memoryview(raw)
        return self._maps[path]

    def tensor(self, extent: Extent) -> torch.Tensor:
        """The extent as a tensor on the mapped bytes. Never write to it."""
        if not extent.numel:
            return torch.empty(extent.shape, dtype=extent.dtype)
        file = self._bytes(extent.path)
        raw = file[extent.offset : extent.end]
        if len(raw) != extent.end - extent.offset:
            raise ValueError(
                f"{extent.path} ends at byte {len(file)}, expected {extent.end} for a tensor of shape "
                f"{extent.shape}; the file is truncated: copy it again"
            )
        flat = torch.frombuffer(raw, dtype=extent.dtype)
        strides = contiguous_strides(extent.shape) if extent.strides is None else extent.strides
        return flat.as_strided(extent.shape, strides)

    def view(self, placement: Placement, extents: Mapping[str, Extent]) -> torch.Tensor:
        """The placement's box in its storage's extent. Never write to it."""
        stored = self.tensor(extents[placement.storage])
        offset = stored.storage_offset() + placement.offset
        return torch.as_strided(stored, placement.box.shape, placement.strides, offset)


@dataclass(frozen=True)
class CheckpointWeights:
    """A model on disk: what each part (a file, a rank's share) holds of it, and where."""

    directory: Path
    parts: tuple[RankPlacements, ...]
    """Numbered 0, 1, ... by their `rank`."""
    extents: tuple[Mapping[str, Extent], ...]
    """Extents of the storages, by part."""

    def dtypes(self) -> dict[torch.dtype, int]:
        """Bytes stored in each dtype, the most first."""
        total: dict[torch.dtype, int] = {}
        for extents in self.extents:
            for extent in extents.values():
                total[extent.dtype] = total.get(extent.dtype, 0) + extent.num_bytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))
