"""Search for the first NaN or infinity in a forward and backward: its module and its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megarlhf.parallel.loss import Loss, LossOutput
from megarlhf.parallel.micro_batch import MicroBatch

During = Literal["forward", "backward", "sums"]
LOSS, MODEL = "(loss)", "(model)"


@dataclass(frozen=True)
class NotFinite:
    """A tensor that is not finite."""

    module: str
    """Name in the model; `(model)` for the model itself, `(loss)` for the loss."""
    tensor: str
    """`weight NAME`, `input 0`, `output`, `gradient of output`, `gradient of weight NAME`."""
    nans: int
    infinities: int
    shape: tuple[int, ...]
    during: During
    """Phase. `sums`: the gradients after summation over micro-batches and ranks."""
    number: int
    """Position of the tensor in the order in which this rank examined its tensors."""

    @classmethod
    def of(cls, module: str, name: str, values: Tensor, during: During, number: int) -> NotFinite | None:
        """Describe a tensor; None when it is finite."""
        finite = torch.isfinite(values)
        if bool(finite.all()):
            return None
        nans = int(torch.isnan(values).sum())
        return cls(module or MODEL, name, nans, int((~finite).sum()) - nans, tuple(values.shape), during, number)

    def __str__(self) -> str:
        elements = torch.Size(self.shape).numel()
        counts = f"{self.nans} NaN and {self.infinities} infinite of {elements} elements {list(self.shape)}"
        return f"{self.tensor} of {self.module}: {counts}"


class LossModule(torch.nn.Module):
    """A loss as a module, so that its value is checked like a module's output."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._loss, self.names = loss, loss.names

    def forward(self, output: Tensor, batch: MicroBatch) -> LossOutput:
        return self._loss(output, batch)


def first_not_finite(
    module: torch.nn.Module, run_step: Callable[[], object], loss: LossModule | None = None
) -> NotFinite | None:
    """Find the first tensor that is not finite, in the order of execution, while `run_step` runs `module` forward and
    possibly backward. None when all are finite. Only this rank's part of the model is checked.

    Order of checks of a module: its own weights and inputs before its forward; its outputs after it; in the backward
    the gradients of its outputs and of its own weights as they are computed. Weight gradients that a kernel adds to
    `main_grad` itself are checked at the end. The value of a `loss` that `run_step` calls is checked; its other sums
    are metrics. Waits for the device at every module: for replays, not for training.
    """
    checks = _Checks()

    def before(name: str, submodule: torch.nn.Module, arguments: Any, options: Any) -> None:
        for label, weight in submodule.named_parameters(recurse=False):
            checks.check("forward", name, f"weight {label}", weight.detach())
        for n, tensor in enumerate(_tensors((arguments, options))):
            checks.check("forward", name, f"input {n}", tensor.detach())

    def after(name: str, submodule: torch.nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if submodule is not loss or tensor.requires_grad:
                checks.check("forward", name, "output", tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(checks.check, "backward", name, "gradient of output"))

    handles: list[Any] = []
    for name, submodule in [*module.named_modules(), *([] if loss is None else [(LOSS, loss)])]:
        handles.append(submodule.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        handles.append(submodule.register_forward_hook(partial(after, name)))
        for label, weight in submodule.named_parameters(recurse=False):
            if weight.requires_grad:
                check = partial(checks.check, "backward", name, f"gradient of weight {label}")
                handles.append(weight.register_hook(check))
    try:
        run_step()
    finally:
        for handle in handles:
            handle.remove()
    for name, submodule in module.named_modules():
        for label, weight in submodule.named_parameters(recurse=False):
            checks.check("sums", name, f"gradient of weight {label}", getattr(weight, "main_grad", None))
    return checks.first


class _Checks:
    """Counts the checked tensors and keeps the first that is not finite."""

    def __init__(self) -> None:
        self.first: NotFinite | None = None
        self._number = 0

    def check(self, during: During, name: str, label: str, tensor: Tensor | None) -> None:
        self._number += 1
        # None: the gradient of a weight whose kernel has added it to `main_grad` itself.
        if self.first is None and tensor is not None and tensor.is_floating_point():
            self.first = NotFinite.of(name, label, tensor, during, self._number)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
