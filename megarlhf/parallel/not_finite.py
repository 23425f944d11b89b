"""Where NaN or infinity first appears in a forward and backward: which module, which of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NotFinite:
    """A tensor that is not finite."""

    module: str
    """By its name in the model; `(model)` for the model itself."""
    tensor: str
    """`weight NAME`, `input 0`, `output`, `gradient of output`, `gradient of weight NAME`."""
    nans: int
    infinities: int
    elements: int

    def __str__(self) -> str:
        counts = f"{self.nans} NaN and {self.infinities} infinite of {self.elements} elements"
        return f"{self.tensor} of {self.module}: {counts}"


def first_not_finite(module: torch.nn.Module, run_step: Callable[[], object]) -> NotFinite | None:
    """The first tensor that is not finite, in the order of execution, while `run_step` runs `module` forward and, it
    may be, backward; None when all are finite. Of this rank's part of the model.

    A module is looked at in this order: its own weights and its inputs before its forward, its outputs after it; in
    the backward the gradient of its outputs and of its own weights as they are computed. Weight gradients that a
    kernel adds to `main_grad` by itself are looked at in the end. Waits for the device at every module: for replays,
    not for training.
    """
    found: list[NotFinite] = []

    def look(name: str, what: str, tensor: Tensor | None) -> None:
        # None: the gradient of a weight whose kernel has added it to `main_grad` itself.
        if found or tensor is None or not tensor.is_floating_point():
            return
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            nans = int(torch.isnan(tensor).sum())
            bad = int((~finite).sum())
            found.append(NotFinite(name or "(model)", what, nans, bad - nans, tensor.numel()))

    def before(name: str, inside: torch.nn.Module, arguments: Any, options: Any) -> None:
        for label, weight in inside.named_parameters(recurse=False):
            look(name, f"weight {label}", weight.detach())
        for n, tensor in enumerate(_tensors((arguments, options))):
            look(name, f"input {n}", tensor.detach())

    def after(name: str, inside: torch.nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            look(name, "output", tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(look, name, "gradient of output"))

    handles: list[Any] = []
    for name, inside in module.named_modules():
        handles.append(inside.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        handles.append(inside.register_forward_hook(partial(after, name)))
        for label, weight in inside.named_parameters(recurse=False):
            if weight.requires_grad:
                handles.append(weight.register_hook(partial(look, name, f"gradient of weight {label}")))
    try:
        run_step()
    finally:
        for handle in handles:
            handle.remove()
    for name, inside in module.named_modules():
        for label, weight in inside.named_parameters(recurse=False):
            if getattr(weight, "main_grad", None) is not None:
                look(name, f"gradient of weight {label}", weight.main_grad)
    return found[0] if found else None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Of nested arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
