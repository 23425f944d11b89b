"""Executes a copy plan from files to files: in pieces, on several threads, with a piece of memory for each.

A piece is a range of rows of one destination tensor: it is put together in memory from views of the mapped
sources, cast on the way, and written in one go. What no copy covers (vocabulary padding) is zero.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarlhf.placement import Box
from megarlhf.weights.plan.copy_plan import Copy, CopyPlan
from megarlhf.weights.transport.extent import Extent, MappedFiles

PIECE_BYTES = 4 << 20
"""Of a destination tensor at a time and thread: fits the cache, and is long enough for a disk."""

ALL_PIECES_BYTES = 64 << 20
"""Of all threads together; beyond 16 threads pieces get smaller."""

Extents = Sequence[Mapping[str, Extent]]
"""By rank, then by storage."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a destination, seen as a matrix of `row` elements a row."""

    extent: Extent
    copies: tuple[Copy, ...]
    row: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.row * self.extent.dtype.itemsize


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

    Raises: ValueError on a source shorter than it says, or a number that float16 cannot hold; OSError of the file
    system. The destinations are then incomplete.
    """
    count = workers or len(os.sched_getaffinity(0))
    piece_bytes = min(PIECE_BYTES, ALL_PIECES_BYTES // count)
    work = _Work(_by_place(plan, destinations, first_destination), sources, piece_bytes, progress)
    with ThreadPoolExecutor(count, thread_name_prefix="transfer") as pool:
        threads = [pool.submit(work.run) for _ in range(count)]
        try:
            wait(threads)
        except BaseException:  # Ctrl-C: the threads stop at their next piece
            work.stop()
            raise
    work.close()
    for thread in threads:
        thread.result()


class _Work:
    """The pieces still to be done, and what the threads share."""

    def __init__(
        self,
        places: Sequence[Place],
        sources: Extents,
        piece_bytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self._pieces = _pieces(places, piece_bytes)
        self._files = _Files(places, piece_bytes)
        self._piece_bytes = piece_bytes
        self._sources, self._maps, self._progress = sources, MappedFiles(), progress
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> None:
        """Takes pieces until there are none, or some thread failed."""
        buffer = torch.empty(self._piece_bytes, dtype=torch.uint8)
        try:
            while (piece := self._next()) is not None:
                if buffer.numel() < piece.num_bytes:
                    buffer = torch.empty(piece.num_bytes, dtype=torch.uint8)
                values = buffer[: piece.num_bytes]
                _assemble(piece, values, self._sources, self._maps)
                self._files.write(piece, values)
                self._progress(piece.num_bytes)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """No further pieces are handed out."""
        self._stopped = True

    def _next(self) -> Piece | None:
        with self._lock:
            return None if self._stopped else next(self._pieces, None)

    def close(self) -> None:
        self._files.close()


Place = tuple[Extent, Sequence[Copy]]
"""A destination and the copies into it."""


def _by_place(plan: CopyPlan, destinations: Extents, first: int) -> list[Place]:
    """Every destination, in the order of files and bytes."""
    copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        copies[copy.dst_rank - first, copy.dst_storage].append(copy)
    found = [
        (extent, copies[rank, storage])
        for rank, extents in enumerate(destinations)
        for storage, extent in extents.items()
    ]
    return sorted(found, key=lambda place: (place[0].path, place[0].offset))


def _pieces(places: Iterable[Place], piece_bytes: int) -> Iterator[Piece]:
    for place in places:
        extent, copies = place
        row, rows, step = _cut(place, piece_bytes)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            parts = (_rows_of(copy, row, start, stop) for copy in copies)
            yield Piece(extent, tuple(part for part in parts if part is not None), row, start, stop)


def _cut(place: Place, piece_bytes: int) -> tuple[int, int, int]:
    """(elements of a row, rows, rows of a piece) of a destination.

    A row is as long as the longest stride of the copies: the declared shape may hide it (Megatron's legacy grouped
    experts are stacked behind one another in a storage that says they stand side by side).
    """
    extent, copies = place
    strides = [s for copy in copies for s, n in zip(copy.dst_strides, copy.shape, strict=True) if n > 1]
    row = max(strides, default=extent.shape[-1] if extent.shape else 1) or 1
    assert extent.numel % row == 0, f"{extent.path}: {extent.numel} elements in rows of {row}"
    return row, extent.numel // row, max(1, piece_bytes // (row * extent.dtype.itemsize))


def _rows_of(copy: Copy, row: int, start: int, stop: int) -> Copy | None:
    """The part of a copy that lands in rows [start, stop) of its destination."""
    first = copy.dst_offset // row
    along = [d for d, n in enumerate(copy.shape) if n > 1 and copy.dst_strides[d] >= row]
    assert len(along) <= 1, f"{copy.dst_storage}: a view of more than one row dim"
    if not along:
        last = copy.dst_offset + sum((n - 1) * s for n, s in zip(copy.shape, copy.dst_strides, strict=True))
        assert last // row == first, f"{copy.dst_storage}: a view that leaves its row"
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


def _assemble(piece: Piece, raw: torch.Tensor, sources: Extents, maps: MappedFiles) -> None:
    """Fills `raw`, the piece's bytes."""
    values = raw.view(piece.extent.dtype)
    if sum(copy.numel for copy in piece.copies) < values.numel():
        values.zero_()
    for copy in piece.copies:
        source = maps.tensor(sources[copy.src_rank][copy.src_storage])
        offset = source.storage_offset() + copy.src_offset
        taken = torch.as_strided(source, copy.shape, copy.src_strides, offset)
        given = torch.as_strided(values, copy.shape, copy.dst_strides, copy.dst_offset - piece.start * piece.row)
        given.copy_(taken)
        if given.dtype == torch.float16 != taken.dtype and not torch.equal(given.isinf(), taken.isinf()):
            raise ValueError(
                f"{copy.tensor} has numbers above {torch.finfo(torch.float16).max:.0f}, the largest of float16; write "
                "bf16 or fp32"
            )


class _Files:
    """The destination files: opened once, synced and closed by whoever writes the last piece."""

    def __init__(self, places: Iterable[Place], piece_bytes: int) -> None:
        self._lock = threading.Lock()
        self._left: dict[Path, int] = defaultdict(int)
        self._open: dict[Path, int] = {}
        for place in places:
            _, rows, step = _cut(place, piece_bytes)
            self._left[place[0].path] += -(-rows // step)

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        path = piece.extent.path
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDWR)
            descriptor = self._open[path]
        row_bytes = piece.row * piece.extent.dtype.itemsize
        at, data = piece.extent.offset + piece.start * row_bytes, memoryview(values.numpy().data)
        while data:
            try:
                written = os.pwrite(descriptor, data, at)
            except OSError as error:
                raise OSError(
                    error.errno, f"{error.strerror} at byte {at}; make room or write elsewhere", str(path)
                ) from error
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
