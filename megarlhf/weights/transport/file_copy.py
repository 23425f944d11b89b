"""Executes a copy plan from files to files, on several threads, each with a small buffer.

A write item is a range of rows of one destination tensor: it is put together in a buffer from views of the mapped
sources, cast on the way, and written in one go. What no copy covers (vocabulary padding) is zero.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf.placement import Box
from megarlhf.weights.plan.copy_plan import Copy, CopyPlan
from megarlhf.weights.transport.extent import Extent, MappedFiles

ITEM_BYTES = 4 << 20
"""Bytes of a destination tensor at a time and thread: they fit the cache, and are enough for a disk."""

ALL_ITEMS_BYTES = 64 << 20
"""Bytes of all threads together; beyond 16 threads items get smaller."""

Extents = Sequence[Mapping[str, Extent]]
"""Extents by rank, then by storage."""


@dataclass(frozen=True, slots=True)
class WriteItem:
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

    Destination ranks of the plan are numbered from `first_destination` on. `progress` gets the bytes written,
    from any thread. Memory: `workers` (default: the cores of this process) x `ITEM_BYTES`, or a row if longer.

    Raises: ValueError on a source shorter than it says, or a number that float16 cannot hold; OSError of the file
    system. The destinations are then incomplete.
    """
    count = workers or len(os.sched_getaffinity(0))
    item_bytes = min(ITEM_BYTES, ALL_ITEMS_BYTES // count)
    queue = _WriteQueue(_by_destination(plan, destinations, first_destination), sources, item_bytes, progress)
    with ThreadPoolExecutor(count, thread_name_prefix="transfer") as pool:
        threads = [pool.submit(queue.run) for _ in range(count)]
        try:
            wait(threads)
        except BaseException:  # Ctrl-C: the threads stop at their next item
            queue.stop()
            raise
    queue.close()
    for thread in threads:
        thread.result()


class _WriteQueue:
    """The items still to be written, and what the threads share."""

    def __init__(
        self,
        destinations: Sequence[Destination],
        sources: Extents,
        item_bytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self._items = _write_items(destinations, item_bytes)
        self._files = _OutputFiles(destinations, item_bytes)
        self._item_bytes = item_bytes
        self._sources, self._maps, self._progress = sources, MappedFiles(), progress
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> None:
        """Takes items until there are none, or some thread failed."""
        buffer = torch.empty(self._item_bytes, dtype=torch.uint8)
        try:
            while (item := self._next()) is not None:
                if buffer.numel() < item.num_bytes:
                    buffer = torch.empty(item.num_bytes, dtype=torch.uint8)
                values = buffer[: item.num_bytes]
                _assemble(item, values, self._sources, self._maps)
                self._files.write(item, values)
                self._progress(item.num_bytes)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """No further items are handed out."""
        self._stopped = True

    def _next(self) -> WriteItem | None:
        with self._lock:
            return None if self._stopped else next(self._items, None)

    def close(self) -> None:
        self._files.close()


Destination = tuple[Extent, Sequence[Copy]]
"""A destination and the copies into it."""


def _by_destination(plan: CopyPlan, destinations: Extents, first: int) -> list[Destination]:
    """Every destination, in the order of files and bytes."""
    copies: dict[tuple[int, str], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        copies[copy.dst_rank - first, copy.dst.storage].append(copy)
    pairs = [
        (extent, copies[rank, storage])
        for rank, extents in enumerate(destinations)
        for storage, extent in extents.items()
    ]
    return sorted(pairs, key=lambda destination: (destination[0].path, destination[0].offset))


def _write_items(destinations: Iterable[Destination], item_bytes: int) -> Iterator[WriteItem]:
    for destination in destinations:
        extent, copies = destination
        row, rows, step = _cut(destination, item_bytes)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            parts = (_rows_of(copy, row, start, stop) for copy in copies)
            yield WriteItem(extent, tuple(part for part in parts if part is not None), row, start, stop)


def _cut(destination: Destination, item_bytes: int) -> tuple[int, int, int]:
    """(elements of a row, rows, rows of an item) of a destination.

    A row is as long as the longest stride of the copies: the declared shape may hide it (Megatron's legacy grouped
    experts are stacked behind one another in a storage that says they stand side by side).
    """
    extent, copies = destination
    strides = [s for copy in copies for s, n in zip(copy.dst.strides, copy.box.shape, strict=True) if n > 1]
    row = max(strides, default=extent.shape[-1] if extent.shape else 1) or 1
    assert extent.numel % row == 0, f"{extent.path}: {extent.numel} elements in rows of {row}"
    return row, extent.numel // row, max(1, item_bytes // (row * extent.dtype.itemsize))


def _rows_of(copy: Copy, row: int, start: int, stop: int) -> Copy | None:
    """The part of a copy that lands in rows [start, stop) of its destination."""
    view, shape = copy.dst, copy.box.shape
    first = view.offset // row
    along = [d for d, n in enumerate(shape) if n > 1 and view.strides[d] >= row]
    assert len(along) <= 1, f"{view.storage}: a view of more than one row dim"
    if not along:
        last = view.offset + sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))
        assert last // row == first, f"{view.storage}: a view that leaves its row"
        return copy if start <= first < stop else None
    (dim,) = along
    assert view.strides[dim] == row, f"{view.storage}: rows {view.strides[dim]} apart, expected {row}"
    a, b = max(start - first, 0), min(stop - first, shape[dim])
    if a >= b:
        return None
    low, high = list(copy.box.start), list(copy.box.stop)
    low[dim], high[dim] = copy.box.start[dim] + a, copy.box.start[dim] + b
    return copy.part(Box(tuple(low), tuple(high)))


def _assemble(item: WriteItem, raw: torch.Tensor, sources: Extents, maps: MappedFiles) -> None:
    """Fills `raw`, the item's bytes."""
    values = raw.view(item.extent.dtype)
    if sum(copy.numel for copy in item.copies) < values.numel():
        values.zero_()
    for copy in item.copies:
        src = maps.view(copy.src, sources[copy.src_rank])
        dst = torch.as_strided(values, copy.box.shape, copy.dst.strides, copy.dst.offset - item.start * item.row)
        dst.copy_(src)
        if dst.dtype == torch.float16 != src.dtype and not torch.equal(dst.isinf(), src.isinf()):
            raise ValueError(
                f"{copy.tensor} has numbers above {torch.finfo(torch.float16).max:.0f}, the largest of float16; write "
                "bf16 or fp32"
            )


class _OutputFiles:
    """The destination files: opened once, synced and closed by whoever writes the last item."""

    def __init__(self, destinations: Iterable[Destination], item_bytes: int) -> None:
        self._lock = threading.Lock()
        self._left: dict[Path, int] = defaultdict(int)
        self._open: dict[Path, int] = {}
        for destination in destinations:
            _, rows, step = _cut(destination, item_bytes)
            self._left[destination[0].path] += -(-rows // step)

    def write(self, item: WriteItem, values: torch.Tensor) -> None:
        path = item.extent.path
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDWR)
            descriptor = self._open[path]
        row_bytes = item.row * item.extent.dtype.itemsize
        at, data = item.extent.offset + item.start * row_bytes, memoryview(values.numpy().data)
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
