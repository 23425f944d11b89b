"""The ledger: which storages live on the device at any moment, of what kind they are and which line made them.

Legend: bytes are those of an allocator that rounds up to blocks (512 bytes on a GPU, as torch's does; none on a CPU).
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from megarlhf.rehearsal.fake_device.origins import KIND_OF_PHASE, OTHERS, Origin, origin_here
from megarlhf.rehearsal.fake_device.torch_patches import address_of, storage_key

GPU_BLOCK = 512
"""Bytes to which torch's caching allocator rounds a request (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""
LARGEST = 5
MOMENTARY = -1
"""In place of a storage's key."""
CURVE_POINTS = 100
"""Of the curve of one stay in a phase, about."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One live piece of device memory."""

    nbytes: int
    origin: Origin
    shape: tuple[int, ...]
    """Of the tensor that it was made for."""
    dtype: str


@dataclass(frozen=True)
class LargeStorage:
    """One of the largest at a peak."""

    nbytes: int
    kind: str
    where: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in one phase of one step; a phase that is entered several times is one."""

    step: int
    phase: str
    start: int
    """Bytes that live when it begins."""
    peak: int
    end: int
    host_peak: int
    """Bytes of the program's own tensors on the host, at most."""
    by_kind: dict[str, int]
    """At the peak."""
    largest: list[LargeStorage]
    curve: list[tuple[float, dict[str, int]]]
    """(seconds on the estimated clock of this rank, bytes by kind), where they change most."""
    begins: list[float] = field(default_factory=list)
    """When each stay in it begins, on the same clock."""


class MemoryChange(NamedTuple):
    """Memory is taken or given back."""

    seconds: float
    """On the rank's clock; within `RepeatedChanges` since its beginning."""
    key: int
    """Of the storage; within `RepeatedChanges` a number of the tape."""
    storage: Storage
    sign: int
    """+1 or -1."""


class RepeatedChanges(NamedTuple):
    """Changes that happen again as they did before, of memory that no tensor holds."""

    begin: float
    first_key: int
    """From `Ledger.reserve`; the key of a number is so much less."""
    changes: Sequence[MemoryChange]


@dataclass
class _Entry:
    """One stay in a phase."""

    step: int
    phase: str
    start: int
    live: dict[int, Storage]
    """At the beginning."""
    begin: float
    """Seconds."""
    changes: list[MemoryChange | RepeatedChanges] = field(default_factory=list)

    def each(self) -> Iterator[MemoryChange]:
        """All changes in order."""
        for change in self.changes:
            if isinstance(change, MemoryChange):
                yield change
            else:
                begin, first = change.begin, change.first_key
                for seconds, number, storage, sign in change.changes:
                    yield MemoryChange(begin + seconds, first - number, storage, sign)


class MemoryListener(Protocol):
    """What may be told every change: `tape.TapeRecorder`."""

    def changed(self, key: int, storage: Storage, sign: int) -> None: ...

    def passed(self, storage: Storage) -> None: ...


class Ledger:
    """Of one rank. `clock` tells the rank's estimated time."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.live: dict[int, Storage] = {}
        self.total = 0
        self.host_total = 0
        self.host_peak = 0
        self._named: dict[int, tuple[Storage, str]] = {}
        """Kinds that are known from what a storage is used for, by the identity of its entry: another storage may get
        the same key when this one is gone. They win over where it was made."""
        self.phases: list[PhaseMemory] = []
        self.seconds = 0.0
        self.listener: MemoryListener | None = None
        self._entry: _Entry | None = None
        self._host: set[int] = set()
        self._away: dict[int, Storage] = {}
        """Storages whose memory is given back for a while."""
        self._next_key = MOMENTARY - 1
        """Of memory that no tensor holds; they fall."""

    # --- storages

    def see(self, tensor: Tensor) -> None:
        """Take note of a device tensor that an operation has returned."""
        storage = tensor.untyped_storage()
        key = address_of(storage)
        if key in self.live:
            return
        nbytes = -(-storage.nbytes() // self.block) * self.block
        origin = origin_here()
        if origin.kind == OTHERS and self._entry is not None:
            origin = replace(origin, kind=KIND_OF_PHASE.get(self._entry.phase.partition("/")[0], OTHERS))
        entry = Storage(nbytes, origin, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self._begin(key, entry)
        finalizer = weakref.finalize(storage, self._gone, key, entry)
        finalizer.atexit = False

    def see_as(self, tensor: Tensor, entry: Storage) -> None:
        """Take note of a new tensor, with what is known of an equal one."""
        storage = tensor.untyped_storage()
        self._begin(address_of(storage), entry)
        finalizer = weakref.finalize(storage, self._gone, address_of(storage), entry)
        finalizer.atexit = False

    def reserve(self, count: int) -> int:
        """The first of so many keys of memory that no tensor holds; each further one is one less."""
        first = self._next_key
        self._next_key -= count
        return first

    def take(self, entry: Storage, key: int) -> None:
        """Memory that no tensor holds, under a reserved key, until `give_back`."""
        self._begin(key, entry)

    def hold(self, nbytes: int, kind: str) -> Callable[[], None]:
        """Memory that something takes for itself, until what is returned is called."""
        if not nbytes:
            return lambda: None
        key = self.reserve(1)
        self.take(Storage(nbytes, replace(origin_here(), kind=kind), (nbytes,), "uint8"), key)
        return partial(self.give_back, key)

    def repeat(self, first_key: int, changes: Sequence[MemoryChange]) -> None:
        """Memory that comes and goes between messages, with keys from `reserve`. What does not go within these changes
        goes in later ones of the same phase."""
        if self._entry is not None:
            self._entry.changes.append(RepeatedChanges(self.seconds, first_key, changes))

    def give_back(self, key: int) -> None:
        """The end of what was taken."""
        self._gone(key, self.live[key])

    def end_early(self, tensor: Tensor) -> None:
        """The memory of a tensor is given back, though the tensor itself is still held by somebody."""
        key = storage_key(tensor)
        if key in self.live:
            self._gone(key, self.live[key])

    def leave_off(self, tensor: Tensor) -> None:
        """The memory of a storage is given back, to be taken again by the same."""
        key = storage_key(tensor)
        entry = self.live[key]
        self._gone(key, entry)
        self._away[key] = entry
        finalizer = weakref.finalize(tensor.untyped_storage(), self._away.pop, key, None)
        finalizer.atexit = False

    def take_again(self, tensor: Tensor) -> None:
        """What was left off lives again, as it was."""
        key = storage_key(tensor)
        self._begin(key, self._away.pop(key))

    def _begin(self, key: int, entry: Storage) -> None:
        self.live[key] = entry
        self.total += entry.nbytes
        self._changed(key, entry, 1)

    def _gone(self, key: int, entry: Storage) -> None:
        if self.live.get(key) is not entry:  # it has ended early
            return
        del self.live[key]
        self.total -= entry.nbytes
        self._changed(key, entry, -1)
        self.on_freed(key)

    def momentary(self, nbytes: int, kind: str) -> None:
        """Memory that an operation takes for itself and gives back before it returns."""
        if not nbytes:
            return
        nbytes = -(-nbytes // self.block) * self.block
        self.pass_through(Storage(nbytes, replace(origin_here(), kind=kind), (nbytes,), "uint8"))

    def pass_through(self, entry: Storage) -> None:
        """Memory that comes and goes at once."""
        if self.listener is not None:
            self.listener.passed(entry)
        if self._entry is not None:
            self._entry.changes += [MemoryChange(self.seconds, MOMENTARY, entry, sign) for sign in (1, -1)]

    def on_freed(self, key: int) -> None:
        """Replaced by who keeps something by storage."""

    def see_host(self, tensor: Tensor) -> None:
        """The same of a real tensor of the program."""
        storage = tensor.untyped_storage()
        key, nbytes = address_of(storage), storage.nbytes()
        if key in self._host or not nbytes:
            return
        self._host.add(key)
        self.host_total += nbytes
        self.host_peak = max(self.host_peak, self.host_total)
        finalizer = weakref.finalize(storage, self._host_gone, key, nbytes)
        finalizer.atexit = False

    def _host_gone(self, key: int, nbytes: int) -> None:
        self._host.discard(key)
        self.host_total -= nbytes

    def held(self) -> dict[str, int]:
        """Bytes by kind of what lives now, or is left off for a while."""
        found: Counter[str] = Counter()
        for storage in (*self.live.values(), *self._away.values()):
            found[self.kind_of(storage)] += storage.nbytes
        return dict(found)

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what storages are for."""
        for tensor in tensors:
            key = storage_key(tensor)
            if (entry := self.live.get(key) or self._away.get(key)) is not None:
                self._named[id(entry)] = entry, kind

    def kind_of(self, storage: Storage) -> str:
        named = self._named.get(id(storage))
        return storage.origin.kind if named is None else named[1]

    # --- phases

    @property
    def step(self) -> int:
        """Of the phase that is open; 0 before the first step."""
        return 0 if self._entry is None else self._entry.step

    def _changed(self, key: int, storage: Storage, sign: int) -> None:
        if self.listener is not None:
            self.listener.changed(key, storage, sign)
        if self._entry is not None:
            self._entry.changes.append(MemoryChange(self.seconds, key, storage, sign))

    def enter(self, step: int, phase: str) -> None:
        """From here on changes belong to this phase; the one before is closed."""
        self.leave()
        self.host_peak = self.host_total
        self._entry = _Entry(step, phase, self.total, dict(self.live), self.seconds)

    def leave(self) -> None:
        """Close the phase that is open, if one is."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self.phases.append(self._closed(entry))

    def _closed(self, entry: _Entry) -> PhaseMemory:
        """Walk through the changes once more: first to the peak, then for the curve."""
        total, peak, at, number = entry.start, entry.start, 0, 0
        for number, (_, _, storage, sign) in enumerate(entry.each(), 1):
            total += sign * storage.nbytes
            if total > peak:
                peak, at = total, number
        live = dict(entry.live)
        for _, key, storage, sign in itertools.islice(entry.each(), at):
            if sign > 0:
                live[key] = storage
            else:
                live.pop(key, None)
        by_kind: Counter[str] = Counter()
        for storage in live.values():
            by_kind[self.kind_of(storage)] += storage.nbytes
        largest = sorted(live.values(), key=lambda storage: -storage.nbytes)[:LARGEST]
        return PhaseMemory(
            step=entry.step,
            phase=entry.phase,
            start=entry.start,
            peak=peak,
            end=total,
            host_peak=self.host_peak,
            by_kind=dict(by_kind.most_common()),
            largest=[LargeStorage(s.nbytes, self.kind_of(s), s.origin.where, s.shape, s.dtype) for s in largest],
            curve=self._curve(entry, number),
            begins=[entry.begin],
        )

    def _curve(self, entry: _Entry, changes: int) -> list[tuple[float, dict[str, int]]]:
        """The peaks of equal stretches of so many changes, so that no peak is lost."""
        now: Counter[str] = Counter()
        for storage in entry.live.values():
            now[self.kind_of(storage)] += storage.nbytes
        points = [(entry.begin, dict(now))]
        stretch = max(1, changes // CURVE_POINTS)
        total, best = entry.start, -1
        for number, (seconds, _, storage, sign) in enumerate(entry.each(), 1):
            now[self.kind_of(storage)] += sign * storage.nbytes
            total += sign * storage.nbytes
            if total > best:
                best, point = total, (seconds, {kind: size for kind, size in now.items() if size})
            if number % stretch == 0 or number == changes:
                points.append(point)
                best = -1
        return points


def merged(stays: Sequence[PhaseMemory]) -> list[PhaseMemory]:
    """One entry for each phase of each step, in the order in which they were entered first."""
    found: dict[tuple[int, str], PhaseMemory] = {}
    for stay in stays:
        before = found.get((stay.step, stay.phase))
        if before is None:
            found[stay.step, stay.phase] = stay
            continue
        at_peak = stay if stay.peak > before.peak else before
        found[stay.step, stay.phase] = replace(
            at_peak,
            start=before.start,
            end=stay.end,
            host_peak=max(before.host_peak, stay.host_peak),
            curve=[*before.curve, *stay.curve],
            begins=[*before.begins, *stay.begins],
        )
    return list(found.values())
