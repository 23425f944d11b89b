"""Strides of results where FakeTensorMode and torch's kernels differ: in dimensions of size 1.

Such dimensions take no memory, but torch's choices depend on their strides. A packed row is [T, 1, H], and the stride
of its middle decides whether a product with it is one of matrices or one for each token. Compared:
tests/rehearsal/test_strides.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device.torch_patches import without_modes

aten = torch.ops.aten
Strides = tuple[int, ...]


def _view(tensor: Tensor, args: Any, kwargs: Any) -> Strides:
    """New strides also for the same shape, where FakeTensorMode keeps them."""
    with without_modes():
        seen = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return seen.view(args[1]).stride()


def _like(tensor: Tensor, args: Any, kwargs: Any) -> Strides | None:
    """Strides of dense memory are kept (empty_like in ATen/native/TensorFactories.cpp)."""
    kept = kwargs.get("memory_format") in (None, torch.preserve_format) and _is_dense(tensor)
    return tensor.stride() if kept else None


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _contiguous(tensor: Tensor, args: Any, kwargs: Any) -> Strides:
    """ATen/native/layer_norm.cpp and its like on a GPU write contiguous memory."""
    return tuple(math.prod(max(size, 1) for size in tensor.shape[n + 1 :]) for n in range(tensor.dim()))


RULES: dict[Any, Callable[[Tensor, Any, Any], Strides | None]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.empty_like.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.full_like.default: _like,
    aten.native_layer_norm.default: _contiguous,
}
"""Strides of an operation's (first) result, from its first argument; None keeps those of FakeTensorMode."""


def with_torch_strides(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The result with torch's strides."""
    rule = RULES.get(func)
    strides = None if rule is None else rule(args[0], args, kwargs)
    first = out[0] if isinstance(out, tuple) else out
    if strides is None or strides == first.stride():
        return out
    first = aten.as_strided.default(first, first.shape, strides)
    return (first, *out[1:]) if isinstance(out, tuple) else first
