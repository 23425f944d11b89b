"""Cache of results by shapes: an operation on tensors of known shapes has a result of the same shape as before.

FakeTensorMode computes the shape of each result anew, in some 200 microseconds. A rank makes millions of operations,
which repeat. The first result of an operation on its arguments' shapes is stored, and made again in 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device.torch_patches import FakeTensor, FakeTensorMode, fake_of, storage_key, view_of

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are part of the key as they are."""


class _Output(NamedTuple):
    """Recipe for one tensor of a result."""

    how: Literal["new", "same", "view", "none"]
    argument: int = 0
    """For `same` and `view`: index of the tensor argument that it is, or that it views."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Offset of a view from its argument's beginning."""
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("meta")


class OperationKey(NamedTuple):
    """Key of an operation with its arguments."""

    parts: tuple[Any, ...]
    """Everything on which the shapes of the result depend."""
    tensors: list[Tensor]
    """Tensors among the arguments, in order."""


@dataclass(slots=True)
class Remembered:
    """Recipe for the result of an operation on arguments of certain shapes."""

    outputs: tuple[_Output, ...]
    sequence: type | None
    """Type of a result that is several tensors."""
    cost: Any = None
    """Cost that the counter of operations may store here."""


class ResultsByShape:
    """Cache of one FakeTensorMode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._remembered: dict[tuple[Any, ...], Remembered] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> OperationKey | None:
        """Key of an operation; None if its result cannot be stored."""
        if torch.Tag.inplace_view in func.tags:
            return None
        parts: list[Any] = [func]
        tensors: list[Tensor] = []
        if not _add(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not _add((value,), parts, tensors):
                return None
        return OperationKey(tuple(parts), tensors)

    def get(self, key: OperationKey) -> Remembered | None:
        """The stored recipe."""
        return self._remembered.get(key.parts)

    def keep(self, key: OperationKey, out: Any) -> Remembered | None:
        """Store a result, if it can be made again from shapes."""
        sequence = type(out) if isinstance(out, list | tuple) else None
        parts = list(out) if sequence is not None else [out]
        outputs = [_describe(part, key.tensors) for part in parts]
        storages = [storage_key(part) for part, o in zip(parts, outputs, strict=True) if o and o.how == "new"]
        if None in outputs or len(set(storages)) < len(storages):
            return None
        remembered = Remembered(tuple(o for o in outputs if o is not None), sequence)
        self._remembered[key.parts] = remembered
        return remembered

    def make(self, remembered: Remembered, tensors: Sequence[Tensor]) -> tuple[Any, list[FakeTensor]]:
        """(the result, its new tensors)"""
        made: list[Any] = []
        new: list[FakeTensor] = []
        for output in remembered.outputs:
            if output.how == "new":
                fake = fake_of(self._mode, output.shape, output.stride, output.dtype, output.device)
                new.append(fake)
                made.append(fake)
            elif output.how == "none":
                made.append(None)
            else:
                argument = tensors[output.argument]
                made.append(
                    argument
                    if output.how == "same"
                    else view_of(
                        self._mode,
                        argument,
                        output.shape,
                        output.stride,
                        int(argument.storage_offset()) + output.offset,
                    )
                )
        if remembered.sequence is None:
            return made[0], new
        return remembered.sequence(made), new


def _add(values: Sequence[Any], parts: list[Any], tensors: list[Tensor]) -> bool:
    """Append arguments to a key. Returns False for an argument that cannot be part of one."""
    for value in values:
        if isinstance(value, FakeTensor):
            tensors.append(value)
            parts += (value.shape, value.stride(), value.dtype, value.fake_device)
        elif isinstance(value, PLAIN):
            parts += (type(value), value)
        elif isinstance(value, Tensor):
            tensors.append(value)
            parts += (value.shape, value.stride(), value.dtype, "host")
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            if not _add(value, parts, tensors):
                return False
        else:
            return False
    return True


def _describe(part: Any, tensors: Sequence[Tensor]) -> _Output | None:
    """Recipe of a tensor; None if it is no tensor of the device, or has another place in memory than it would be
    given."""
    if part is None:
        return _Output("none")
    if not isinstance(part, FakeTensor):
        return None
    shape, stride = tuple(part.shape), tuple(part.stride())
    for number, tensor in enumerate(tensors):
        if part is tensor:
            return _Output("same", number)
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, FakeTensor) and storage_key(tensor) == storage_key(part):
            if tensor.dtype != part.dtype:
                return None
            offset = int(part.storage_offset()) - int(tensor.storage_offset())
            return _Output("view", number, shape, stride, offset, part.dtype)
    least = (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) if 0 not in shape else 0
    if part.storage_offset() or part.untyped_storage().nbytes() != least * part.element_size():
        return None
    return _Output("new", 0, shape, stride, 0, part.dtype, part.fake_device)
