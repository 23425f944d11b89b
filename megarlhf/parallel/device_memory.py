"""Memory by phase: what of each role is on the device while it works, and in host memory while others do.

A *part* is what comes and goes as one: the parameters of a role, its gradients, its optimizer's state; an engine adds
parts of its own. A part's storages that go away are copied into host memory and shrink to nothing. Every view of them
stays the tensor that it is and has its numbers again when the storage is back: Megatron-Core's buffers, the optimizer
and vLLM notice nothing.

Whoever computes says so first, by a *turn* that names the parts it needs: all others that may go away do, then those
come back. So nothing moves between two turns of one role, and where nothing may go away nothing moves at all.

This file may name CUDA: on a GPU the host memory is pinned, and copies run on a stream of their own. What leaves is
copied beside the work that follows, and its memory is used again when it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megarlhf.config import OffloadConfig

resize = torch.ops.inductor.resize_storage_bytes_
"""(tensor, bytes): makes its storage so large; through the dispatcher, so that a rehearsal sees it."""


class Offloadable(Protocol):
    """What comes and goes as one."""

    @property
    def present(self) -> bool: ...

    def offload(self) -> None:
        """Give the device's memory back."""

    def onload(self) -> None:
        """Be on the device again, or on the way."""

    def wait(self) -> None:
        """What the device computes from here on finds it there."""

    def synchronize(self) -> None:
        """Wait for messages between ranks that still fill it."""


class HostMemory:
    """The other side: what parts have taken of it is counted. Without a GPU it is memory like any other."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._pinned = device.type == "cuda"
        # One for each direction, in which they do not slow each other down.
        self._out = torch.cuda.Stream(device) if self._pinned else None
        self._back = torch.cuda.Stream(device) if self._pinned else None

    def take(self, nbytes: int) -> Tensor:
        """So many bytes, for as long as the run lasts."""
        self.nbytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def fill(self, host: Tensor, whole: Tensor) -> None:
        """Copy to the host; the device's memory may be given back at once, and is used again when it is copied."""
        if self._out is None:
            host.copy_(whole)
            return
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            host.copy_(whole, non_blocking=True)
        whole.record_stream(self._out)

    def read(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy to the device from the host. Returns what waits for it."""
        if self._back is None or self._out is None:
            for whole, host in copies:
                whole.copy_(host)
            return lambda: None
        self._back.wait_stream(self._out)  # the host's memory may just be filled
        self._back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._back):
            for whole, host in copies:
                whole.copy_(host, non_blocking=True)
            done = self._back.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def view_like(self, tensor: Tensor, host: Tensor) -> Tensor:
        """Of the memory that has the numbers of its storage, the view that this tensor is."""
        return host.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def synchronize(self) -> None:
        """Wait until what has left is there."""
        if self._out is not None:
            self._out.synchronize()


def _nothing() -> None: ...


@dataclass
class _Moved:
    """A storage of the device."""

    whole: Tensor
    """All of it, flat."""
    nbytes: int
    host: Tensor | None = None
    """Its numbers."""


class Tensors:
    """The part that some tensors are: their storages, each once."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        host: HostMemory,
        *,
        copied: bool = True,
        constant: bool = False,
        without: Callable[[], Iterable[Tensor]] = tuple,
        settle: Callable[[], None] = _nothing,
    ) -> None:
        """
        tensors: asked whenever they leave, as an optimizer makes its state in its first step
        copied: their numbers come back; otherwise what comes back is memory of any content
        constant: their numbers never change, and are copied to the host once
        without: tensors of other parts; storages that are also theirs stay
        settle: waits for messages that still fill them
        """
        self._tensors, self._host, self._copied, self._constant = tensors, host, copied, constant
        self._without, self._settle = without, settle
        self._away: list[_Moved] = []
        self._kept: dict[int, tuple[int, Tensor]] = {}
        """Bytes and host memory, by storage."""
        self._arrival: Callable[[], None] = _nothing
        self.present = True

    def changes(self) -> None:
        """Its numbers may change from now on."""
        self._constant = False

    @property
    def nbytes(self) -> int:
        """Of the device's memory that it takes while it is there."""
        return sum(each.nbytes for each in self._away) if not self.present else sum(m.nbytes for m in self._storages())

    @torch.no_grad()
    def offload(self) -> None:
        assert self.present, "a part leaves that is away"
        self.wait()
        self.synchronize()
        self.present, self._away = False, list(self._storages())
        for moved in self._away:
            if self._copied:
                moved.host = self._copy_of(moved)
            resize(moved.whole, 0)

    @torch.no_grad()
    def onload(self) -> None:
        assert not self.present, "a part comes that is there"
        self.present = True
        for moved in self._away:
            resize(moved.whole, moved.nbytes)
        copies = [(moved.whole.view(torch.uint8), moved.host) for moved in self._away if moved.host is not None]
        if copies:
            self._arrival = self._host.read(copies)
        self._away = []

    @property
    def away(self) -> dict[int, Tensor]:
        """Host memory of what is not on the device, by storage."""
        return {_key(each.whole): each.host for each in self._away if each.host is not None}

    def wait(self) -> None:
        self._arrival()
        self._arrival = _nothing

    def synchronize(self) -> None:
        self._settle()

    def _copy_of(self, moved: _Moved) -> Tensor:
        key = _key(moved.whole)
        nbytes, host = self._kept.get(key, (0, None))
        if host is not None and nbytes == moved.nbytes and self._constant:
            return host
        if host is None or nbytes != moved.nbytes:  # another storage may be where one was
            host = self._host.take(moved.nbytes)
            self._kept[key] = moved.nbytes, host
        self._host.fill(host, moved.whole.view(torch.uint8))
        return host

    def _storages(self) -> Iterator[_Moved]:
        seen = set(map(_key, self._without()))
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage._cdata in seen or not storage.nbytes():
                continue
            seen.add(storage._cdata)
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            yield _Moved(flat, storage.nbytes())


def _key(tensor: Tensor) -> int:
    """Of its storage, on whichever side its numbers are."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class RoleParts:
    """Of one role."""

    device_memory: DeviceMemory
    parameters: Tensors
    gradients: Tensors | None = None
    optimizer: tuple[Tensors, ...] = ()
    """In pieces."""
    streams: bool = False
    """A step of the optimizer brings the pieces one after the other."""

    def to_compute(self) -> None:
        """A forward without gradients, or something that reads the weights, begins."""
        self.device_memory.keep_only(self.parameters)

    def to_learn(self, *, settled: bool = True) -> None:
        """Forward and backward begin, or what looks at the gradients. Not `settled`: a module waits by itself for what
        still fills its parameters."""
        self.device_memory.keep_only(self.parameters, *self._of_gradients, settled=settled)

    def to_update(self) -> None:
        """A step of the whole optimizer begins."""
        self.device_memory.keep_only(self.parameters, *self._of_gradients, *self.optimizer)

    def to_update_piece(self, number: int) -> None:
        """A step of one piece begins; the next one comes meanwhile."""
        now, soon = self.optimizer[number], self.optimizer[number + 1 : number + 2]
        self.device_memory.keep_only(self.parameters, *self._of_gradients, now, soon=soon)

    def to_read(self) -> Callable[[Tensor], Tensor]:
        """The state is read, or filled, where it lies: nothing moves. Returns what gives for one of its tensors the
        memory that has its numbers: itself, or the same view of host memory."""
        away: dict[int, Tensor] = {}
        for part in self._state:
            away |= part.away
            if part.present:
                part.wait()
                part.synchronize()
        self.device_memory.host.synchronize()

        def lies(tensor: Tensor) -> Tensor:
            host = away.get(_key(tensor))
            return tensor if host is None else self.device_memory.host.view_like(tensor, host)

        return lies

    def turns(self, role: str) -> dict[str, OnDevice]:
        """By phase, what the role needs in it."""
        parameters, learns = (self.parameters,), (self.parameters, *self._of_gradients)
        updates = learns if self.streams else (*learns, *self.optimizer)
        needs = {"score": parameters, "train": learns, "optimizer": updates}
        return {
            f"{kind}/{role}": OnDevice(self.device_memory, partial(tuple, parts), settled=kind != "train")
            for kind, parts in needs.items()
        }

    @property
    def _state(self) -> tuple[Tensors, ...]:
        """What a resume point holds."""
        return (self.parameters, *self.optimizer)

    @property
    def _of_gradients(self) -> tuple[Tensors, ...]:
        return () if self.gradients is None else (self.gradients,)


@dataclass(frozen=True)
class OnDevice:
    """A turn that may be taken before its work begins, as a phase does that says what it needs."""

    device_memory: DeviceMemory
    needed: Callable[[], Sequence[Offloadable]]
    settled: bool = True

    @property
    def moves(self) -> bool:
        """Whether anything has to come or to leave."""
        return self.device_memory.moves(*self.needed())

    def __call__(self) -> None:
        self.device_memory.keep_only(*self.needed(), settled=self.settled)


class DeviceMemory:
    """Which parts are on the device. One for all roles and the engine of a process."""

    def __init__(self, device: torch.device, host: HostMemory | None = None, *, shared: bool = False) -> None:
        """`shared`: several work in turns, so that what is `auto` goes away where it helps: on a GPU."""
        self.device, self.host = device, host or HostMemory(device)
        self.auto = shared and device.type != "cpu"
        self._movable: list[Offloadable] = []

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def allow_offload(self, *parts: Offloadable) -> None:
        """From now on these go away in the turns of others."""
        self._movable += parts

    def forget(self, *parts: Offloadable) -> None:
        """These are no more."""
        self._movable = [part for part in self._movable if not any(part is each for each in parts)]

    def share(self, parts: RoleParts, offload: OffloadConfig) -> None:
        """Let go of what the configuration says in the turns of others."""
        if offload.parameters is True or (offload.parameters == "auto" and self.auto):
            self._movable.append(parts.parameters)
        if offload.gradients and parts.gradients is not None:
            self._movable.append(parts.gradients)
        if offload.optimizer is True or parts.streams:
            self._movable += parts.optimizer

    def moves(self, *needed: Offloadable) -> bool:
        """Whether a turn that needs these would move anything."""
        leaving = any(part.present and not any(part is each for each in needed) for part in self._movable)
        return leaving or not all(part.present for part in needed)

    def keep_only(self, *needed: Offloadable, soon: Iterable[Offloadable] = (), settled: bool = True) -> None:
        """Whoever calls needs these parts until the next turn, and those that come `soon` in it. All others leave.

        They leave before any comes, so that the device never holds both.
        """
        stay = (*needed, *soon)
        for part in self._movable:
            if part.present and not any(part is each for each in stay):
                part.offload()
        for part in stay:
            if not part.present:
                part.onload()
        for part in needed:
            part.wait()
            if settled:
                part.synchronize()
