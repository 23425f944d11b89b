"""Host memory for offloaded parts of roles: counted, its copies priced, without content."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megarlhf.parallel.device_memory import HostMemory
from megarlhf.rehearsal.cost_model.meter import Meter


class RehearsedHost(HostMemory):
    """Replacement of pinned memory. A real run copies what leaves beside the following work. Here all copies are waited
    for, so that the estimate is no lower than the truth."""

    def __init__(self, device: torch.device, meter: Meter, seconds: Callable[[int], float]) -> None:
        """`seconds` prices a copy of so many bytes."""
        super().__init__(device)
        self._meter, self._seconds = meter, seconds

    def take(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def fill(self, host: Tensor, whole: Tensor) -> None:
        self._copied(whole)

    def read(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        for whole, _ in copies:
            self._copied(whole)
        return lambda: None

    def view_like(self, tensor: Tensor, host: Tensor) -> Tensor:
        """A tensor of one element, expanded."""
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.size())

    def _copied(self, whole: Tensor) -> None:
        self._meter.spend("offload", self._seconds(whole.numel() * whole.element_size()), 0.0)
