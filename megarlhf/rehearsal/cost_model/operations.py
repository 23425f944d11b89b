"""Classes of torch's operations by name: the resource that bounds them, and the bytes that they read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarlhf.rehearsal.cost_model.hardware import MemoryClass
from megarlhf.rehearsal.fake_device.torch_patches import tree_flatten
from megarlhf.rehearsal.timeline.trace import Work


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
FREE = _names(
    "detach lift_fresh empty empty_like new_empty empty_strided new_empty_strided alias _unsafe_view _reshape_alias"
)
"""Operations that touch no number."""
MATH = _names(
    "exp exp_ log log_ log1p log2 logsumexp sigmoid sigmoid_ sigmoid_backward silu silu_ silu_backward gelu "
    "gelu_backward tanh tanh_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data cos sin "
    "softplus softplus_backward log_sigmoid_forward log_sigmoid_backward pow erf normal_ uniform_ bernoulli_ "
    "exponential_ native_dropout"
)
REDUCTIONS = _names(
    "sum mean amax amin max min argmax argmin any all prod var std var_mean count_nonzero "
    "cumsum sort topk native_layer_norm _fused_rms_norm"
)
INDEXING = _names(
    "index index_select embedding gather take index_put index_put_ _unsafe_index _unsafe_index_put _index_put_impl_ "
    "index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ embedding_dense_backward "
    "index_select_backward repeat_interleave masked_select"
)
NORMS = _names("norm linalg_vector_norm _foreach_norm")
READ_ROWS = _names("index index_select embedding gather take _unsafe_index")
"""Operations that read only the named rows of their tensor."""
WRITE_ROWS = _names("index_put_ _index_put_impl_ index_add_ index_copy_ scatter_ scatter_add_ embedding_dense_backward")
"""Operations that write only the named rows of their tensor."""
FILLS = _names("zero_ fill_ zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange")


def work_of(name: str) -> Work:
    """The resource that bounds an operation."""
    if name in PRODUCTS:
        return "matmul"
    return "attention" if "attention" in name or "_varlen_attn" in name else "memory"


def memory_class(name: str, args: Sequence[Any], out: Any) -> MemoryClass:
    """Class of an operation other than a product or attention."""
    if name in MATH:
        return "math"
    if name in NORMS:
        return "largest" if math.inf in args[1:2] else "norm"
    if name in INDEXING:
        return "index"
    if name in FILLS:
        return "fill"
    if name in REDUCTIONS:
        return "reduce"
    tensors = [x for x in args[:2] if isinstance(x, Tensor)]
    results = out if isinstance(out, Tensor) else None
    if name in ("_to_copy", "copy_") and len({x.dtype for x in (*tensors, results) if x is not None}) > 1:
        return "cast"
    return "copy"


def touched_bytes(name: str, args: Sequence[Any], out: Any, tensors: Sequence[Tensor]) -> int:
    """Bytes read and written. `tensors`: tensors of the device, arguments first, then results. A tensor that is written
    in place is among both."""
    if name in FILLS:
        return sum(map(stored_bytes, _results(out))) or sum(map(stored_bytes, tensors[:1]))
    if name == "copy_":
        return sum(map(stored_bytes, tensors[:2]))
    if name in READ_ROWS:
        rows = sum(map(stored_bytes, _results(out)))
        return 2 * rows + _bytes_of_indices(tensors)
    if name in WRITE_ROWS:
        written = args[0] if isinstance(args[0], Tensor) else None
        values = [x for x in tree_flatten(args[1:])[0] if isinstance(x, Tensor) and x.dtype.is_floating_point]
        own = [] if name != "embedding_dense_backward" else _results(out)
        values = values if name != "embedding_dense_backward" else [x for x in (written,) if x is not None]
        return 2 * sum(map(stored_bytes, values)) + sum(map(stored_bytes, own)) + _bytes_of_indices(tensors)
    return sum(map(stored_bytes, tensors))


def _results(out: Any) -> list[Tensor]:
    return [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]


def _bytes_of_indices(tensors: Sequence[Tensor]) -> int:
    return sum(stored_bytes(x) for x in tensors if x.dtype in (torch.int64, torch.int32))


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in memory. An expanded tensor repeats its elements."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= int(size) if stride else 1
    return numel * tensor.element_size() if tensor.numel() else 0
