"""Tapes: the memory, work and messages of a device between two moments, recorded in order to be played again.

Example, of an operation that makes a tensor and releases the input of its layer: [Made(0, storage), Spent("matmul",
...), Freed("input", 0)].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megarlhf.rehearsal.cost_model.meter import Meter, Spending
from megarlhf.rehearsal.fake_device.ledger import Ledger, MemoryChange, Storage
from megarlhf.rehearsal.fake_device.torch_patches import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensorMode,
    fake_of,
    storage_key,
)
from megarlhf.rehearsal.timeline.messages import Line, Wire
from megarlhf.rehearsal.timeline.trace import Collective, Event, Receive, Send, Wait, Work

Owner = Literal["own", "before", "forward", "input", "grad_output"]
"""Owner of released memory: this tape; the same layer's forward before this one; the forward of this backward; a tensor
that came in."""


class MemoryMark(NamedTuple):
    """A piece of memory. Its key alone would not do: another piece may get it later."""

    key: int
    storage: Storage | None


class Made(NamedTuple):
    """An allocation, the `number`-th of the tape."""

    number: int
    storage: Storage


class Freed(NamedTuple):
    """A release."""

    owner: Owner
    number: int


class Passing(NamedTuple):
    """Memory inside an operation."""

    storage: Storage


class Spent(NamedTuple):
    """Work."""

    work: Work
    spending: Spending


class MessageCall(NamedTuple):
    """A message that is issued or waited for."""

    event: Event


class Counted(NamedTuple):
    """A row of the table of messages. Step and phase are those at the time of playing."""

    line: Line
    nbytes: int


class InnerStretch(NamedTuple):
    """A stretch of another tape that is played while this one is open."""

    first_key: int
    """First key of the other tape's memory in this play."""
    reserved: int
    """Number of keys."""
    stretch: Stretch


Note = Made | Freed | Passing | Spent | MessageCall | Counted | InnerStretch


class Out(NamedTuple):
    """A tensor that leaves the tape."""

    number: int | None
    """Number of its memory; None if it is the input."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether it requires a gradient. This matters without a graph too: Megatron-Core adds in place where no gradient
    is required."""


@dataclass
class Stretch:
    """Notes between two messages, combined."""

    changes: list[MemoryChange] = field(default_factory=list)
    """Memory that is allocated and released within the tape."""
    spendings: dict[Work, Spending] = field(default_factory=dict)
    seconds: float = 0.0

    def spend(self, work: Work, more: Spending) -> None:
        """Add work."""
        self.spendings[work] = self.spendings.get(work, Spending()).plus(more)
        self.seconds += more.seconds

    def add(self, played: Stretch, first_number: int) -> None:
        """Add another stretch, whose numbers begin at `first_number`."""
        begin = self.seconds
        self.changes += [MemoryChange(begin + at, first_number + n, what, sign) for at, n, what, sign in played.changes]
        for work, spending in played.spendings.items():
            self.spend(work, spending)


@dataclass
class Tape:
    """Notes in order."""

    notes: list[Note] = field(default_factory=list)
    count: int = 0
    """Number of allocations."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Numbers of living storages, by their key."""
    results: list[Out] = field(default_factory=list)
    _compacted: Compact | None = None

    def set_results(self, *tensors: Tensor) -> None:
        """Set the tensors with which the tape ends."""
        self.results = [
            Out(self.numbers.get(storage_key(x)), tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad)
            for x in tensors
        ]

    def drop_first_use(self) -> None:
        """Drop the allocations of a backward that survive it: they were made at first use, for all backwards."""
        kept = set(self.numbers.values()) - {out.number for out in self.results}
        self.notes = [note for note in self.notes if not (isinstance(note, Made) and note.number in kept)]

    def compact(self) -> Compact:
        """The notes in fewer pieces, and the count of numbers in them. To be called when the tape is complete."""
        if self._compacted is None:
            self._compacted = _compact(self.notes, self.count)
        return self._compacted


Compact = tuple[list[Note | Stretch], int]


def _compact(notes: Sequence[Note], count: int) -> Compact:
    """Combine notes. `count`: numbers in use. Memory inside operations gets further ones."""
    ends = {note.number for note in notes if isinstance(note, Freed) and note.owner == "own"}
    storages = {note.number: note.storage for note in notes if isinstance(note, Made)}
    further = count
    inner: dict[int, int] = {}
    """Numbers here of the keys that other tapes' plays have reserved."""
    pieces: list[Note | Stretch] = []
    for note in notes:
        match note:
            case Spent(work, spending):
                _open_stretch(pieces).spend(work, spending)
            case Made(number, storage) if number in ends:
                stretch = _open_stretch(pieces)
                stretch.changes.append(MemoryChange(stretch.seconds, number, storage, 1))
            case Freed("own", number):
                stretch = _open_stretch(pieces)
                stretch.changes.append(MemoryChange(stretch.seconds, number, storages[number], -1))
            case Passing(storage):
                stretch = _open_stretch(pieces)
                stretch.changes += [MemoryChange(stretch.seconds, further, storage, sign) for sign in (1, -1)]
                further += 1
            case InnerStretch(first_key, reserved, played):
                stretch = _open_stretch(pieces)
                if first_key not in inner:
                    inner[first_key], further = further, further + reserved
                stretch.add(played, inner[first_key])
            case _:
                pieces.append(note)
    return pieces, further


def _open_stretch(pieces: list[Note | Stretch]) -> Stretch:
    """The last piece if it is a stretch, otherwise a new one."""
    if not (pieces and isinstance(pieces[-1], Stretch)):
        pieces.append(Stretch())
    stretch = pieces[-1]
    assert isinstance(stretch, Stretch)
    return stretch


class TapeRecorder:
    """Recorder of a rank's ledger, meter and wire while a tape is open."""

    def __init__(self, ledger: Ledger, meter: Meter, wire: Wire) -> None:
        self._ledger, self._parts = ledger, (ledger, meter, wire)
        self.tape: Tape | None = None
        self._others: dict[int, tuple[Owner, int]] = {}
        self._outer: Any = None
        """Another listener, which hears everything too."""

    def begin(self, others: Mapping[int, tuple[Owner, int]]) -> Tape:
        """Begin a tape. Another recorder's tape may be open; it goes on.

        others: existing memory by key, with the name by which its release is recorded.
        """
        assert self.tape is None, "a tape is begun while another of the same recorder is open"
        tape = self.tape = Tape()
        self._others = dict(others)
        self._outer = self._ledger.listener
        for part in self._parts:
            part.listener = self
        return tape

    def mark(self, tensor: Tensor) -> MemoryMark:
        """The memory of a tensor."""
        key = storage_key(tensor)
        return MemoryMark(key, self._ledger.live.get(key))

    def is_alive(self, mark: MemoryMark) -> bool:
        return mark.storage is not None and self._ledger.live.get(mark.key) is mark.storage

    def remaining_of(self, tape: Tape, owner: Owner) -> dict[int, tuple[Owner, int]]:
        """Living memory of a tape under an owner's name, for `begin`."""
        made = {note.number: note.storage for note in tape.notes if isinstance(note, Made)}
        return {key: (owner, n) for key, n in tape.numbers.items() if self.is_alive(MemoryMark(key, made[n]))}

    def end(self) -> None:
        """Complete the tape."""
        self.tape = None
        for part in self._parts:
            part.listener = self._outer
        self._outer = None

    # --- as the listener of ledger, meter, wire and player

    def changed(self, key: int, storage: Storage, sign: int) -> None:
        if self._outer is not None:
            self._outer.changed(key, storage, sign)
        tape = self._open()
        if sign > 0:
            tape.numbers[key] = tape.count
            tape.notes.append(Made(tape.count, storage))
            tape.count += 1
        elif key in tape.numbers:
            tape.notes.append(Freed("own", tape.numbers.pop(key)))
        elif key in self._others:
            tape.notes.append(Freed(*self._others.pop(key)))

    def passed(self, storage: Storage) -> None:
        if self._outer is not None:
            self._outer.passed(storage)
        self._open().notes.append(Passing(storage))

    def work_done(self, work: Work, spending: Spending) -> None:
        if self._outer is not None:
            self._outer.work_done(work, spending)
        self._open().notes.append(Spent(work, spending))

    def message_issued(self, event: Event) -> None:
        if self._outer is not None:
            self._outer.message_issued(event)
        self._open().notes.append(MessageCall(event))

    def counted(self, line: Line, nbytes: int) -> None:
        if self._outer is not None:
            self._outer.counted(line, nbytes)
        self._open().notes.append(Counted(line, nbytes))

    def repeated(self, first_key: int, reserved: int, stretch: Stretch) -> None:
        assert self._outer is None, "a tape is played while two are open"
        self._open().notes.append(InnerStretch(first_key, reserved, stretch))

    def _open(self) -> Tape:
        assert self.tape is not None
        return self.tape


class Player:
    """Player of tapes on the ledger, meter and wire of a rank."""

    def __init__(self, ledger: Ledger, meter: Meter, wire: Wire, mode: FakeTensorMode, device: torch.device) -> None:
        self._ledger, self._meter, self._wire, self._mode, self._device = ledger, meter, wire, mode, device

    def play(self, tape: Tape, others: Mapping[Owner, Any]) -> tuple[list[Tensor], dict[int, int]]:
        """Play a tape. Returns (tensors that go out, keys of surviving memory by number).

        others: owners of memory that the tape may release: tensors that came in, one of which also goes out if none is
        made for it; for `before` and `forward` the keys that `play` returned for them.
        """
        keys: dict[int, int] = {}
        numbers: dict[int, int] = {}
        made: dict[int, Tensor] = {}
        notes, reserved = tape.compact()
        outs = {out.number: out for out in tape.results}
        first = self._ledger.reserve(reserved)
        listener = self._ledger.listener
        for note in notes:
            match note:
                case Stretch(changes, spendings):
                    if isinstance(listener, TapeRecorder):
                        listener.repeated(first, reserved, note)
                    if changes:
                        self._ledger.repeat(first, changes)
                    self._meter.repeat_spendings(spendings)
                case Made(number, storage):
                    if number in outs:
                        made[number] = self._made(outs[number])
                        self._ledger.record_as(made[number], storage)
                    else:
                        keys[number] = first - number
                        self._ledger.take(storage, keys[number])
                case Freed(owner, number):
                    self._free(number, others[owner])
                case Counted(line, nbytes):
                    self._wire.repeat_count(line, nbytes)
                case MessageCall(event):
                    self._meter.message(self._renumbered(event, numbers))
        came_in = others.get("grad_output", others.get("input"))
        return [came_in if out.number is None else made[out.number] for out in tape.results], keys

    def _made(self, out: Out) -> Tensor:
        with DisableTorchFunction(), DisableTorchDispatch():
            return fake_of(self._mode, out.size, out.stride, out.dtype, self._device)

    def _free(self, number: int, owner: Any) -> None:
        if isinstance(owner, Tensor):
            self._ledger.release_early(owner)
        elif owner is not None and (key := owner.pop(number, None)) is not None:
            self._ledger.give_back(key)

    def _renumbered(self, event: Event, numbers: dict[int, int]) -> Event:
        """A message with a number of this rank."""
        if isinstance(event, Wait):
            return Wait(self._meter.phase, numbers[event.number])
        assert isinstance(event, Collective | Send | Receive)
        numbers[event.number] = number = self._wire.next_number()
        return replace(event, phase=self._meter.phase, number=number)
