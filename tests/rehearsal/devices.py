"""A device without numbers outside of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megarlhf.rehearsal import interfaces
from megarlhf.rehearsal.device import Device
from megarlhf.rehearsal.memory import Ledger
from megarlhf.rehearsal.sites import SITES, Assumptions, Site
from megarlhf.rehearsal.wire import Wire


class Uncounted:
    """In place of a meter."""

    def operation(self, func, args, out, tensors): ...

    def again(self, cost): ...


@contextlib.contextmanager
def a_device(sites: tuple[Site, ...] = SITES) -> Iterator[Device]:
    """In force inside, on the way of a CPU."""
    ledger = Ledger(1)
    wire = Wire(0, 1, {}, lambda event: None)
    device = Device(interfaces.device_of("cpu"), ledger, wire, Assumptions(sites), Uncounted())
    ledger.enter(1, "train")
    with interfaces.lifting_only_host_tensors(), device:
        yield device


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of the device; nobody knows its numbers."""
    return torch.empty(shape, dtype=dtype, device=torch.device("cpu", 0))
