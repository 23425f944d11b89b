"""A device without numbers outside of a run."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fake_device.assumptions import SITES, Assumptions, Site
from megarlhf.rehearsal.fake_device.device import FakeDevice
from megarlhf.rehearsal.fake_device.ledger import Ledger
from megarlhf.rehearsal.timeline.messages import Labels, Wire


class Uncounted:
    """In place of a meter."""

    def operation(self, func, args, out, tensors): ...

    def repeat(self, cost): ...


@contextlib.contextmanager
def a_device(sites: tuple[Site, ...] = SITES) -> Iterator[FakeDevice]:
    """In force inside, on the way of a CPU."""
    ledger = Ledger(1)
    wire = Wire(0, 1, Labels({}, {}), lambda event: None)
    device = FakeDevice(torch_patches.device_of("cpu"), ledger, wire, Assumptions(sites), Uncounted())
    ledger.enter(1, "train")
    with torch_patches.lifting_only_host_tensors(), device:
        yield device


@contextlib.contextmanager
def a_rank(rank: int, world_size: int) -> Iterator[FakeDevice]:
    """The same in a process group that reaches nobody, with torch's functions patched as in a rehearsal."""
    torch_patches.join(rank, world_size, "cpu")
    try:
        with a_device() as device:
            hooks = torch_patches.Hooks(
                device=device.device,
                scalar=device.scalar,
                address=device.address,
                reducing=lambda operation: setattr(device, "reducing", operation),
                gathered=lambda value: None,
                scattered=lambda: "what rank 0 says",
                launched=lambda name, arguments: None,
                attention=None,
                buckets=None,
                recomputing=lambda now: setattr(device.counter, "recomputing", now),
            )
            with torch_patches.patched(hooks):
                yield device
    finally:
        dist.destroy_process_group()


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of the device; nobody knows its numbers."""
    return torch.empty(shape, dtype=dtype, device=torch.device("cpu", 0))
