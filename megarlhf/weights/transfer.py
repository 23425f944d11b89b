"""Executes a copy plan from files to files: in pieces, on several threads, with a piece of memory for each.

A piece is a range of rows of one destination tensor: it is put together in memory from views of the mapped
sources, cast on the way, and written in one go. What no copy covers (vocabulary padding) is zero.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarlhf.weights.formats.extent import Extent, MappedFiles
from megarlhf.weights.placement import Box, Shape
from megarlhf.weights.plan import Copy, CopyPlan

PIECE_BYTES = 4 << 20
"""Of a destination tensor at a time and thread: fits the cache, and is long enough for a disk."""

Extents = Sequence[Mapping[str, Extent]]
"""By rank, then by storage."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a destination, seen as a matrix of its last dim."""

    extent: Extent
    copies: tuple[Copy, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * _row(self.extent.shape) * self.extent.dtype.itemsize


def transfer(
    plan: CopyPlan,
    sources: Extents,
    destinations: Extents,
    *,
    first_destination: int,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fills every destination extent; its files exist at full length, and are synced when complete.

    Destination ranks of the plan are numbered from `first_destination` on. `progress` is told the bytes written,
    from any thread. Memory: `workers` (default: the cores of this process) x `PIECE_BYTES`, or a row if longer.

    Raises: ValueError on a source shorter than it says, OSError of the file system; the destinations are then
    incomplete.
    """
    pieces = _pieces(plan, destinations, first_destination)
    maps = MappedFiles()
    files = _Files(pieces)
    local = threading.local()

    def work(piece: Piece) -> None:
        values = _assemble(piece, sources, maps, local)
        files.write(piece, values)
        progress(piece.num_bytes)

    pool = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="transfer")
    try:
        for done in [pool.submit(work, piece) for piece in pieces]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        files.close()


def _pieces(plan: CopyPlan, destinations: Extents, first: int) -> list[Piece]:
    """In the order of files and bytes."""
    copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        copies[copy.dst_rank - first, copy.dst_storage].append(copy)
    pieces = []
    for rank, extents in enumerate(destinations):
        for storage, extent in extents.items():
            pieces += _cut(extent, copies[rank, storage])
    return sorted(pieces, key=lambda piece: (piece.extent.path, piece.extent.offset, piece.start))


def _cut(extent: Extent, copies: Sequence[Copy]) -> list[Piece]:
    row = _row(extent.shape)
    rows = extent.numel // row if row else 0
    step = max(1, PIECE_BYTES // (row * extent.dtype.itemsize)) if row else 1
    pieces = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        parts = (_rows_of(copy, row, start, stop) for copy in copies)
        pieces.append(Piece(extent, tuple(part for part in parts if part is not None), start, stop))
    return pieces


def _row(shape: Shape) -> int:
    """Elements of a row: the last dim; a vector is one row."""
    return shape[-1] if shape else 1


def _rows_of(copy: Copy, row: int, start: int, stop: int) -> Copy | None:
    """The part of a copy that lands in rows [start, stop) of its destination."""
    first = copy.dst_offset // row
    along = [d for d, n in enumerate(copy.shape) if n > 1 and copy.dst_strides[d] >= row]
    assert len(along) <= 1, f"{copy.dst_storage}: a view of more than one row dim"
    if not along:
        return copy if start <= first < stop else None
    (dim,) = along
    assert copy.dst_strides[dim] == row, f"{copy.dst_storage}: rows {copy.dst_strides[dim]} apart, expected {row}"
    a, b = max(start - first, 0), min(stop - first, copy.shape[dim])
    if a >= b:
        return None
    low, high = list(copy.box.start), list(copy.box.stop)
    low[dim], high[dim] = copy.box.start[dim] + a, copy.box.start[dim] + b
    box = Box(tuple(low), tuple(high))
    source, destination = copy.source.part(box), copy.destination.part(box)
    return replace(copy, box=box, src_offset=source.offset, dst_offset=destination.offset)


def _assemble(piece: Piece, sources: Extents, maps: MappedFiles, local: threading.local) -> torch.Tensor:
    """The piece's elements, in this thread's buffer."""
    row = _row(piece.extent.shape)
    count = (piece.stop - piece.start) * row
    size = count * piece.extent.dtype.itemsize
    if getattr(local, "buffer", None) is None or local.buffer.numel() < size:
        local.buffer = torch.empty(max(size, PIECE_BYTES), dtype=torch.uint8)
    values = local.buffer[:size].view(piece.extent.dtype)
    if sum(copy.numel for copy in piece.copies) < count:
        values.zero_()
    for copy in piece.copies:
        source = maps.tensor(sources[copy.src_rank][copy.src_storage]).contiguous()
        offset = source.storage_offset() + copy.src_offset
        taken = torch.as_strided(source, copy.shape, copy.src_strides, offset)
        torch.as_strided(values, copy.shape, copy.dst_strides, copy.dst_offset - piece.start * row).copy_(taken)
    return local.buffer[:size]


class _Files:
    """The destination files: opened once, synced and closed by whoever writes the last piece."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._lock = threading.Lock()
        self._left: dict[Path, int] = defaultdict(int)
        self._open: dict[Path, int] = {}
        for piece in pieces:
            self._left[piece.extent.path] += 1

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        path = piece.extent.path
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDWR)
            descriptor = self._open[path]
        row_bytes = _row(piece.extent.shape) * piece.extent.dtype.itemsize
        at, data = piece.extent.offset + piece.start * row_bytes, memoryview(values.numpy().data)
        while data:
            written = os.pwrite(descriptor, data, at)
            at, data = at + written, data[written:]
        with self._lock:
            self._left[path] -= 1
            done = self._left[path] == 0
            if done:
                del self._open[path]
        if done:
            os.fsync(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}
