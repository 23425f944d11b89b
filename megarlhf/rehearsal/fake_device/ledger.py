"""The ledger: the storages on the device at any moment, with their kind and the line that made them.

Legend: bytes are those of an allocator that rounds up to blocks (512 bytes on a GPU, as torch's does; none on a CPU).
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megarlhf.rehearsal.fake_device.origins import KIND_OF_PHASE, OTHERS, Origin, origin_here
from megarlhf.rehearsal.fake_device.torch_patches import address_of, storage_key

GPU_BLOCK = 512
"""Bytes to which torch's caching allocator rounds a request (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""
LARGEST = 5
MOMENTARY = -1
"""Key for memory inside an operation."""
CURVE_POINTS = 100
"""Approximate number of points of the curve in one stay in a phase."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One live piece of device memory."""

    nbytes: int
    origin: Origin
    shape: tuple[int, ...]
    """Shape of the tensor that it was made for."""
    dtype: str


@dataclass(frozen=True)
class LargeStorage:
    """One of the largest storages at a peak."""

    nbytes: int
    kind: str
    where: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in one phase of one step. Several stays in a phase are one row."""

    step: int
    phase: str
    start: int
    """Bytes at the beginning."""
    peak: int
    end: int
    host_peak: int
    """Largest number of bytes of the program's own tensors on the host."""
    by_kind: dict[str, int]
    """Bytes by kind, at the peak."""
    largest: list[LargeStorage]
    curve: list[tuple[float, dict[str, int]]]
    """(seconds on the estimated clock of this rank, bytes by kind) at the largest changes."""
    begins: list[float] = field(default_factory=list)
    """Beginning of each stay, on the same clock."""


class MemoryChange(NamedTuple):
    """Allocation or release of memory."""

    seconds: float
    """Seconds on the rank's clock; within `RepeatedChanges` since their beginning."""
    key: int
    """Key of the storage; within `RepeatedChanges` its number on the tape."""
    storage: Storage
    sign: int
    """+1 for an allocation, -1 for a release."""


class RepeatedChanges(NamedTuple):
    """Changes that are repeated, of memory that no tensor holds."""

    begin: float
    first_key: int
    """First key from `Ledger.reserve`. The key of a number is less by that number."""
    changes: Sequence[MemoryChange]


@dataclass
class _Stay:
    """One stay in a phase."""

    step: int
    phase: str
    start: int
    live: dict[int, Storage]
    """Storages at the beginning."""
    begin: float
    """Seconds at the beginning."""
    changes: list[MemoryChange | RepeatedChanges] = field(default_factory=list)

    def all_changes(self) -> Iterator[MemoryChange]:
        """All changes in order."""
        for change in self.changes:
            if isinstance(change, MemoryChange):
                yield change
            else:
                begin, first = change.begin, change.first_key
                for seconds, number, storage, sign in change.changes:
                    yield MemoryChange(begin + seconds, first - number, storage, sign)


class MemoryListener(Protocol):
    """Listener to every change: `tape.TapeRecorder`."""

    def changed(self, key: int, storage: Storage, sign: int) -> None: ...

    def passed(self, storage: Storage) -> None: ...


class Ledger:
    """Memory of one rank's device. `seconds` is the rank's estimated time."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.live: dict[int, Storage] = {}
        self.total = 0
        self.host_total = 0
        self.host_peak = 0
        self._named: dict[int, tuple[Storage, str]] = {}
        """Kinds that follow from the use of a storage, by the identity of its entry: another storage may get the same
        key after this one. They take precedence over the place of origin."""
        self.phases: list[PhaseMemory] = []
        self.seconds = 0.0
        self.listener: MemoryListener | None = None
        self._stay: _Stay | None = None
        self._host: set[int] = set()
        self._suspended: dict[int, Storage] = {}
        """Storages whose memory is given back for a while."""
        self._next_key = MOMENTARY - 1
        """Next key of memory that no tensor holds. These keys fall."""

    # --- storages

    def record(self, tensor: Tensor) -> None:
        """Record a device tensor that an operation has returned."""
        storage = tensor.untyped_storage()
        key = address_of(storage)
        if key in self.live:
            return
        nbytes = -(-storage.nbytes() // self.block) * self.block
        origin = origin_here()
        if origin.kind == OTHERS and self._stay is not None:
            origin = replace(origin, kind=KIND_OF_PHASE.get(self._stay.phase.partition("/")[0], OTHERS))
        entry = Storage(nbytes, origin, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self._begin(key, entry)
        _at_end_of(storage, self._released, key, entry)

    def record_as(self, tensor: Tensor, entry: Storage) -> None:
        """Record a new tensor with the entry of an equal one."""
        storage = tensor.untyped_storage()
        self._begin(address_of(storage), entry)
        _at_end_of(storage, self._released, address_of(storage), entry)

    def reserve(self, count: int) -> int:
        """Reserve keys for memory that no tensor holds. Returns the first; each further one is less by one."""
        first = self._next_key
        self._next_key -= count
        return first

    def take(self, entry: Storage, key: int) -> None:
        """Allocate memory that no tensor holds, under a reserved key, until `give_back`."""
        self._begin(key, entry)

    def hold(self, nbytes: int, kind: str) -> Callable[[], None]:
        """Allocate memory for something other than a tensor. Returns the function that releases it."""
        if not nbytes:
            return lambda: None
        key = self.reserve(1)
        self.take(Storage(nbytes, replace(origin_here(), kind=kind), (nbytes,), "uint8"), key)
        return partial(self.give_back, key)

    def repeat(self, first_key: int, changes: Sequence[MemoryChange]) -> None:
        """Repeat changes between two messages, with keys from `reserve`. Memory that is not released in them is
        released by later ones of the same phase."""
        if self._stay is not None:
            self._stay.changes.append(RepeatedChanges(self.seconds, first_key, changes))

    def give_back(self, key: int) -> None:
        """Release memory that `take` allocated."""
        self._released(key, self.live[key])

    def release_early(self, tensor: Tensor) -> None:
        """Release the memory of a tensor that somebody still holds."""
        key = storage_key(tensor)
        if key in self.live:
            self._released(key, self.live[key])

    def suspend(self, tensor: Tensor) -> None:
        """Release the memory of a storage that will take it again."""
        key = storage_key(tensor)
        entry = self.live[key]
        self._released(key, entry)
        self._suspended[key] = entry
        _at_end_of(tensor.untyped_storage(), self._suspended.pop, key, None)

    def resume(self, tensor: Tensor) -> None:
        """Take the memory of a storage again."""
        key = storage_key(tensor)
        self._begin(key, self._suspended.pop(key))

    def _begin(self, key: int, entry: Storage) -> None:
        self.live[key] = entry
        self.total += entry.nbytes
        self._changed(key, entry, 1)

    def _released(self, key: int, entry: Storage) -> None:
        if self.live.get(key) is not entry:  # it has ended early
            return
        del self.live[key]
        self.total -= entry.nbytes
        self._changed(key, entry, -1)
        self.on_freed(key)

    def momentary(self, nbytes: int, kind: str) -> None:
        """Count memory that an operation takes for itself and gives back before it returns."""
        if not nbytes:
            return
        nbytes = -(-nbytes // self.block) * self.block
        self.pass_through(Storage(nbytes, replace(origin_here(), kind=kind), (nbytes,), "uint8"))

    def pass_through(self, entry: Storage) -> None:
        """Count memory that is released at once."""
        if self.listener is not None:
            self.listener.passed(entry)
        if self._stay is not None:
            self._stay.changes += [MemoryChange(self.seconds, MOMENTARY, entry, sign) for sign in (1, -1)]

    def on_freed(self, key: int) -> None:
        """Callback for a released key. Whoever keeps something by storage replaces it."""

    def record_host(self, tensor: Tensor) -> None:
        """Record a real tensor of the program."""
        storage = tensor.untyped_storage()
        key, nbytes = address_of(storage), storage.nbytes()
        if key in self._host or not nbytes:
            return
        self._host.add(key)
        self.host_total += nbytes
        self.host_peak = max(self.host_peak, self.host_total)
        _at_end_of(storage, self._host_released, key, nbytes)

    def _host_released(self, key: int, nbytes: int) -> None:
        self._host.discard(key)
        self.host_total -= nbytes

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind of all storages, including those whose memory is given back for a while."""
        sizes: Counter[str] = Counter()
        for storage in (*self.live.values(), *self._suspended.values()):
            sizes[self.kind_of(storage)] += storage.nbytes
        return dict(sizes)

    def set_kind(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of storages by their use."""
        for tensor in tensors:
            key = storage_key(tensor)
            if (entry := self.live.get(key) or self._suspended.get(key)) is not None:
                self._named[id(entry)] = entry, kind

    def kind_of(self, storage: Storage) -> str:
        named = self._named.get(id(storage))
        return storage.origin.kind if named is None else named[1]

    # --- phases

    @property
    def step(self) -> int:
        """Step of the open phase; 0 before the first step."""
        return 0 if self._stay is None else self._stay.step

    def _changed(self, key: int, storage: Storage, sign: int) -> None:
        if self.listener is not None:
            self.listener.changed(key, storage, sign)
        if self._stay is not None:
            self._stay.changes.append(MemoryChange(self.seconds, key, storage, sign))

    def enter(self, step: int, phase: str) -> None:
        """Begin a phase. The one before is closed."""
        self.leave()
        self.host_peak = self.host_total
        self._stay = _Stay(step, phase, self.total, dict(self.live), self.seconds)

    def leave(self) -> None:
        """Close the open phase, if there is one."""
        stay, self._stay = self._stay, None
        if stay is not None:
            self.phases.append(self._closed(stay))

    def _closed(self, stay: _Stay) -> PhaseMemory:
        """Memory of a stay, from two passes over its changes: one to the peak, one for the curve."""
        total, peak, peak_number, number = stay.start, stay.start, 0, 0
        for number, (_, _, storage, sign) in enumerate(stay.all_changes(), 1):
            total += sign * storage.nbytes
            if total > peak:
                peak, peak_number = total, number
        live = dict(stay.live)
        for _, key, storage, sign in itertools.islice(stay.all_changes(), peak_number):
            if sign > 0:
                live[key] = storage
            else:
                live.pop(key, None)
        by_kind: Counter[str] = Counter()
        for storage in live.values():
            by_kind[self.kind_of(storage)] += storage.nbytes
        largest = sorted(live.values(), key=lambda storage: -storage.nbytes)[:LARGEST]
        return PhaseMemory(
            step=stay.step,
            phase=stay.phase,
            start=stay.start,
            peak=peak,
            end=total,
            host_peak=self.host_peak,
            by_kind=dict(by_kind.most_common()),
            largest=[LargeStorage(s.nbytes, self.kind_of(s), s.origin.where, s.shape, s.dtype) for s in largest],
            curve=self._curve(stay, number),
            begins=[stay.begin],
        )

    def _curve(self, stay: _Stay, changes: int) -> list[tuple[float, dict[str, int]]]:
        """Peaks of equal stretches of changes, so that no peak is lost."""
        now: Counter[str] = Counter()
        for storage in stay.live.values():
            now[self.kind_of(storage)] += storage.nbytes
        points = [(stay.begin, dict(now))]
        stretch = max(1, changes // CURVE_POINTS)
        total, best = stay.start, -1
        for number, (seconds, _, storage, sign) in enumerate(stay.all_changes(), 1):
            now[self.kind_of(storage)] += sign * storage.nbytes
            total += sign * storage.nbytes
            if total > best:
                best, point = total, (seconds, {kind: size for kind, size in now.items() if size})
            if number % stretch == 0 or number == changes:
                points.append(point)
                best = -1
        return points


def _at_end_of(storage: Any, call: Callable[..., object], *args: object) -> None:
    """Call a function when a storage is freed, but not at the end of the process."""
    finalizer = weakref.finalize(storage, call, *args)
    finalizer.atexit = False


def merged(stays: Sequence[PhaseMemory]) -> list[PhaseMemory]:
    """One row for each phase of each step, in the order of first entry."""
    phases: dict[tuple[int, str], PhaseMemory] = {}
    for stay in stays:
        before = phases.get((stay.step, stay.phase))
        if before is None:
            phases[stay.step, stay.phase] = stay
            continue
        at_peak = stay if stay.peak > before.peak else before
        phases[stay.step, stay.phase] = replace(
            at_peak,
            start=before.start,
            end=stay.end,
            host_peak=max(before.host_peak, stay.host_peak),
            curve=[*before.curve, *stay.curve],
            begins=[*before.begins, *stay.begins],
        )
    return list(phases.values())
