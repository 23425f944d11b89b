"""Values of device tensors that are known because they were computed from known ones: masks, lengths, tokens, counters.

A *twin* is a real tensor on the host beside a fake one on the device. Views have views of the twin, and a write into
one is repeated in the other, so that a twin always holds the device's values. A write from unknown values ends the
knowledge of the whole storage. Example: `lengths.to(device)` has a twin, so `lengths.to(device).sum().item()` is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device.routing import in_router
from megarlhf.rehearsal.fake_device.torch_patches import FakeTensor, storage_key
from megarlhf.rehearsal.fake_device.trees import tensors_in, with_tensors

LARGEST_BYTES = 512 << 20
"""Largest twin: larger tensors are not followed. The tokens of 1,024 sequences of 32k are 256 MiB."""
LARGEST_MADE = 4096
"""Largest number of elements of a floating-point tensor that is made from nothing (zeros, ones) and followed. Buffers
for gradients and activations are made so, and nobody reads their values."""
LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""Operations that depend on the shape of their argument and not on its values."""
RANDOM = ("rand", "normal", "uniform", "bernoulli", "multinomial", "empty")
"""Parts of names of operations with an unpredictable result."""


class Known:
    """The twins of one rank."""

    def __init__(self) -> None:
        self._storages: set[int] = set()
        """Storages whose values are known."""

    def twin(self, tensor: Tensor) -> Tensor | None:
        """Values of a tensor; a real tensor is its own twin; None where they are unknown. Of no elements they are
        known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        twin: Tensor | None = getattr(tensor, "_twin", None)
        return twin if twin is not None and storage_key(tensor) in self._storages else None

    def set_twin(self, fake: Tensor, numbers: Tensor) -> None:
        """Set the values of `fake`. `numbers` must not be a tensor of the program."""
        fake._twin = numbers  # type: ignore[attr-defined]
        self._storages.add(storage_key(fake))

    def forget(self, tensor: Tensor) -> None:
        """Note that the tensor's memory now holds unknown values."""
        if isinstance(tensor, FakeTensor):
            self._storages.discard(storage_key(tensor))

    def forget_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Forget the values of gradients, to which unknown ones are added."""
        for parameter in parameters:
            if (buffer := getattr(parameter, "main_grad", None)) is not None:
                self.forget(buffer)

    def freed(self, key: int) -> None:
        self._storages.discard(key)

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, written: Sequence[Tensor]) -> None:
        """Repeat on the twins what `func` did on the fake tensors, or forget what it has written."""
        if by_shape := func._overloadpacket.__name__ in LIKE:
            args = (torch.empty((), dtype=args[0].dtype, device="cpu").expand(args[0].shape), *args[1:])
        inputs = tensors_in((args, kwargs))
        outputs = [x for x in tensors_in((out,)) if isinstance(x, FakeTensor)]
        if not self._can_follow(func, [] if by_shape else inputs, outputs):
            for tensor in written:
                self.forget(tensor)
            return
        on_host = {k: v for k, v in with_tensors(kwargs, self._real).items() if k != "pin_memory"}
        if "device" in on_host:
            on_host["device"] = torch.device("cpu")
        twins = tensors_in((func(*with_tensors(args, self._real), **on_host),))
        changed = {id(tensor) for tensor in written}
        for fake, twin in zip(outputs, twins, strict=True):
            if id(fake) not in changed:
                # A host tensor that is handed to the device must not become the device's memory.
                shared = not func.is_view and any(twin is x for x in inputs)
                self.set_twin(fake, twin.clone() if shared else twin)

    def _can_follow(self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        if any(part in func._schema.name for part in RANDOM) or not outputs:
            return False
        if any(self.twin(tensor) is None for tensor in inputs):
            return False
        if func.is_view:
            return True
        if sum(tensor.numel() * tensor.element_size() for tensor in outputs) > LARGEST_BYTES:
            return False
        if inputs or all(tensor.numel() <= LARGEST_MADE or not tensor.dtype.is_floating_point for tensor in outputs):
            return True
        return in_router()  # which makes its map of zeros

    def _real(self, value: Any) -> Any:
        return self.twin(value) if isinstance(value, FakeTensor) else value
