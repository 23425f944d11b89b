"""Offloading by phase: a role's memory is on the device while the role works, and in host memory while others do.

A *part* is moved as a whole: the parameters of a role, its gradients, or its optimizer's state. An engine adds parts of
its own. To offload a part, its storages are copied to host memory and resized to 0 bytes. Every view of a storage stays
valid and has its numbers again when the part is loaded: Megatron-Core's buffers, the optimizer and vLLM notice nothing.

Before computing, a caller lists the parts that it needs on the device (`DeviceMemory.keep_only`). Everything else that
may be offloaded is offloaded, then the listed parts are loaded. Nothing moves between two calls with the same parts,
and nothing moves at all where nothing may be offloaded.

This file may name CUDA: on a GPU the host memory is pinned, and copies run on their own streams. An offloaded part is
copied beside the work that follows; its device memory is reused once it is copied.
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
"""(tensor, bytes): resize the tensor's storage. It goes through the dispatcher, so that a rehearsal sees it."""


class Offloadable(Protocol):
    """Memory that is offloaded and loaded as a whole."""

    @property
    def present(self) -> bool: ...

    def offload(self) -> None:
        """Give the device's memory back."""

    def onload(self) -> None:
        """Begin to load the part onto the device."""

    def wait(self) -> None:
        """Make the device's following work wait until the part is loaded."""

    def synchronize(self) -> None:
        """Wait for messages between ranks that still write to the part."""


class HostMemory:
    """Host memory for offloaded parts, pinned where there is a GPU. `nbytes` counts what has been allocated."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._pinned = device.type == "cuda"
        # A stream for each direction, so that the two directions do not slow each other down.
        self._out = torch.cuda.Stream(device) if self._pinned else None
        self._back = torch.cuda.Stream(device) if self._pinned else None

    def take(self, nbytes: int) -> Tensor:
        """Allocate this many bytes for the rest of the run."""
        self.nbytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def fill(self, host: Tensor, whole: Tensor) -> None:
        """Copy to the host. The caller may release the device's memory at once; it is reused after the copy."""
        if self._out is None:
            host.copy_(whole)
            return
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            host.copy_(whole, non_blocking=True)
        whole.record_stream(self._out)

    def read(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy pairs (device, host) to the device. Returns a function that waits for these copies."""
        if self._back is None or self._out is None:
            for whole, host in copies:
                whole.copy_(host)
            return lambda: None
        self._back.wait_stream(self._out)  # copies to the host may still be running
        self._back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._back):
            for whole, host in copies:
                whole.copy_(host, non_blocking=True)
            done = self._back.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def view_like(self, tensor: Tensor, host: Tensor) -> Tensor:
        """View of `host`, a copy of the tensor's storage, with the tensor's dtype, shape and strides."""
        return host.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def synchronize(self) -> None:
        """Wait for all copies to the host."""
        if self._out is not None:
            self._out.synchronize()


def _nothing() -> None: ...


@dataclass
class _Moved:
    """A storage of the device that is or may be offloaded."""

    whole: Tensor
    """Flat view of the whole storage."""
    nbytes: int
    host: Tensor | None = None
    """Copy in host memory."""


class Tensors:
    """A part that consists of the storages of some tensors."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        host: HostMemory,
        *,
        copied: bool = True,
        constant: bool = False,
        without: Callable[[], Iterable[Tensor]] = tuple,
        synchronize: Callable[[], None] = _nothing,
    ) -> None:
        """
        tensors: called at every offload, since an optimizer makes its state in its first step
        copied: numbers are restored; otherwise the content is undefined after loading
        constant: numbers never change, and are copied to the host once
        without: tensors of other parts, whose storages stay on the device
        synchronize: waits for messages that still write to the tensors
        """
        self._tensors, self._host, self._copied, self._constant = tensors, host, copied, constant
        self._without, self.synchronize = without, synchronize
        self._away: list[_Moved] = []
        self._host_by_storage: dict[int, tuple[int, Tensor]] = {}
        """Storage -> bytes and host memory."""
        self._arrival: Callable[[], None] = _nothing
        self.present = True

    def may_change(self) -> None:
        """Declare that the numbers may change from now on."""
        self._constant = False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the part takes while it is present."""
        return sum(moved.nbytes for moved in (self._storages() if self.present else self._away))

    @torch.no_grad()
    def offload(self) -> None:
        assert self.present, "a part is offloaded that is away"
        self.wait()
        self.synchronize()
        self.present, self._away = False, list(self._storages())
        for moved in self._away:
            if self._copied:
                moved.host = self._copy_of(moved)
            resize(moved.whole, 0)

    @torch.no_grad()
    def onload(self) -> None:
        assert not self.present, "a part is loaded that is present"
        self.present = True
        for moved in self._away:
            resize(moved.whole, moved.nbytes)
        copies = [(moved.whole.view(torch.uint8), moved.host) for moved in self._away if moved.host is not None]
        if copies:
            self._arrival = self._host.read(copies)
        self._away = []

    @property
    def away(self) -> dict[int, Tensor]:
        """Storage -> its copy in host memory, for storages that are offloaded."""
        return {_key(moved.whole): moved.host for moved in self._away if moved.host is not None}

    def wait(self) -> None:
        self._arrival()
        self._arrival = _nothing

    def _copy_of(self, moved: _Moved) -> Tensor:
        key = _key(moved.whole)
        nbytes, host = self._host_by_storage.get(key, (0, None))
        if host is not None and nbytes == moved.nbytes and self._constant:
            return host
        if host is None or nbytes != moved.nbytes:  # the key may be that of an earlier storage
            host = self._host.take(moved.nbytes)
            self._host_by_storage[key] = moved.nbytes, host
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
    """Identity of the tensor's storage, whether it is on the device or offloaded."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class RoleParts:
    """The parts of one role. Call a `to_...` method before the work that it names."""

    device_memory: DeviceMemory
    parameters: Tensors
    gradients: Tensors | None = None
    optimizer: tuple[Tensors, ...] = ()
    """Pieces of the optimizer's state."""
    streams: bool = False
    """An optimizer step loads the pieces one after the other."""

    def to_compute(self) -> None:
        """Prepare a forward without gradients, or reading the weights."""
        self.device_memory.keep_only(self.parameters)

    def to_learn(self, *, synchronize: bool = True) -> None:
        """Prepare forward and backward, or reading the gradients. `synchronize=False`: the module itself waits for
        messages that still write to its parameters."""
        self.device_memory.keep_only(self.parameters, *self._gradients, synchronize=synchronize)

    def to_update(self) -> None:
        """Prepare a step of the whole optimizer."""
        self.device_memory.keep_only(self.parameters, *self._gradients, *self.optimizer)

    def to_update_piece(self, number: int) -> None:
        """Prepare an optimizer step of one piece. The next piece is loaded meanwhile."""
        now, soon = self.optimizer[number], self.optimizer[number + 1 : number + 2]
        self.device_memory.keep_only(self.parameters, *self._gradients, now, soon=soon)

    def to_read(self) -> Callable[[Tensor], Tensor]:
        """Prepare to read or write the saved state (parameters and optimizer) in place; nothing moves.

        Returns: a function from a tensor of the state to the memory with its numbers: the tensor itself, or the same
        view of host memory
        """
        away: dict[int, Tensor] = {}
        for part in (self.parameters, *self.optimizer):
            away |= part.away
            if part.present:
                part.wait()
                part.synchronize()
        self.device_memory.host.synchronize()

        def device_or_host_view(tensor: Tensor) -> Tensor:
            host = away.get(_key(tensor))
            return tensor if host is None else self.device_memory.host.view_like(tensor, host)

        return device_or_host_view

    def before_phases(self, role: str) -> dict[str, OnDevice]:
        """Phase -> preparation of the device memory for it."""
        learns = (self.parameters, *self._gradients)
        updates = learns if self.streams else (*learns, *self.optimizer)
        needed = {"score": (self.parameters,), "train": learns, "optimizer": updates}
        return {
            f"{kind}/{role}": OnDevice(self.device_memory, partial(tuple, parts), synchronize=kind != "train")
            for kind, parts in needed.items()
        }

    @property
    def _gradients(self) -> tuple[Tensors, ...]:
        return () if self.gradients is None else (self.gradients,)


@dataclass(frozen=True)
class OnDevice:
    """Preparation of the device memory for a phase."""

    device_memory: DeviceMemory
    needed: Callable[[], Sequence[Offloadable]]
    synchronize: bool = True

    @property
    def moves(self) -> bool:
        """Whether any part has to be offloaded or loaded."""
        return self.device_memory.moves(*self.needed())

    def __call__(self) -> None:
        self.device_memory.keep_only(*self.needed(), synchronize=self.synchronize)


class DeviceMemory:
    """The parts that may be offloaded. One object for all roles and the engine of a process."""

    def __init__(self, device: torch.device, host: HostMemory | None = None, *, shared: bool = False) -> None:
        """`shared`: several roles take turns on the device, so that `auto` means to offload (on a GPU)."""
        self.device, self.host = device, host or HostMemory(device)
        self.auto = shared and device.type != "cpu"
        self._movable: list[Offloadable] = []

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def allow_offload(self, *parts: Offloadable) -> None:
        """Offload these parts from now on whenever they are not needed."""
        self._movable += parts

    def forget(self, *parts: Offloadable) -> None:
        """Remove parts that no longer exist."""
        self._movable = [part for part in self._movable if not _is_in(part, parts)]

    def share(self, parts: RoleParts, offload: OffloadConfig) -> None:
        """Allow to offload the parts of a role that the configuration names."""
        if offload.parameters is True or (offload.parameters == "auto" and self.auto):
            self._movable.append(parts.parameters)
        if offload.gradients and parts.gradients is not None:
            self._movable.append(parts.gradients)
        if offload.optimizer is True or parts.streams:
            self._movable += parts.optimizer

    def moves(self, *needed: Offloadable) -> bool:
        """Whether `keep_only` of these parts would move anything."""
        leaving = any(part.present and not _is_in(part, needed) for part in self._movable)
        return leaving or not all(part.present for part in needed)

    def keep_only(self, *needed: Offloadable, soon: Iterable[Offloadable] = (), synchronize: bool = True) -> None:
        """Offload everything else that may be offloaded, then load these parts and those needed `soon`.

        Parts are offloaded before any is loaded, so that the device never holds both.
        """
        stay = (*needed, *soon)
        for part in self._movable:
            if part.present and not _is_in(part, stay):
                part.offload()
        for part in stay:
            if not part.present:
                part.onload()
        for part in needed:
            part.wait()
            if synchronize:
                part.synchronize()


def _is_in(part: Offloadable, parts: Sequence[Offloadable]) -> bool:
    return any(part is other for other in parts)
