"""Table of the memory that a CPU takes inside an operation, where no dispatcher sees it, with sources.

Read in torch's `torch/csrc/distributed/c10d/ProcessGroupGloo.cpp`, `aten/src/ATen/native/LinearAlgebra.cpp` and
`aten/src/ATen/native/mkldnn/Matmul.cpp`, and measured with 2.13 (tests/rehearsal/test_scratch.py).
Left out: memory that gloo takes by malloc, which does not go through torch's allocator; and oneDNN's scratchpads of
products in bf16, which depend on the instructions of the CPU (up to 9 MB for factors of 4096 x 4096 on one with AMX).
On a GPU, buffers of NCCL and workspaces of cuBLAS are part of the stated margin instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fake_device.torch_patches import tree_flatten


def _nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_flatten(tensors)[0] if isinstance(x, Tensor))


def _whole(args: Sequence[Any]) -> int:
    return _nbytes(args[0])


def _whole_and_joined(args: Sequence[Any]) -> int:
    return _nbytes(args[0]) + _joined(args[1])


def _joined(tensors: Any) -> int:
    """Bytes that `flattenDenseTensors` copies: it does so if there are several tensors."""
    return _nbytes(tensors) if len(tensors) > 1 else 0


GLOO: Mapping[str, Callable[[Sequence[Any]], int]] = {
    # AsyncAllgatherWork::allgather: `flatOutputTensor`, copied into the outputs afterwards. `_allgather_base` cuts its
    # output and calls it.
    "allgather_": _whole,
    "_allgather_base_": _whole,
    # AsyncAllgatherCoalescedWork::allgatherCoalesced: `flatInputTensor`, `flatOutputTensor`.
    "allgather_coalesced_": _whole_and_joined,
    "allgather_into_tensor_coalesced_": _whole_and_joined,
    # ProcessGroupGloo::reduce_scatter_tensor_coalesced: `buffers`, clones of the inputs, which are all-reduced;
    # `_reduce_scatter_base` calls it.
    "_reduce_scatter_base_": lambda args: _nbytes(args[1]),
    "reduce_scatter_tensor_coalesced_": lambda args: _nbytes(args[1]),
    # AsyncAllreduceCoalescedWork::allreduceCoalesced: `coalescedTensor`.
    "allreduce_coalesced_": lambda args: _joined(args[0]),
    # AsyncGatherWork::gather: `flatOutputTensor`, on the root, which alone has outputs.
    "gather_": _whole,
    # AsyncAlltoallWork::alltoall takes flat tensors as they are; lists are joined.
    "alltoall_": lambda args: _nbytes(args[0]) + _joined(args[1]),
}
"""Bytes by operation of `torch.ops.c10d`, from its arguments."""


def of_message(name: str, args: Sequence[Any]) -> int:
    """Bytes that gloo's process group takes for a message until it is complete."""
    formula = GLOO.get(name)
    return 0 if formula is None else formula(args)


aten = torch.ops.aten
LEAST_PRODUCT = 16**3
"""mkldnn_gemm_min_size: smaller products in bf16 do not use oneDNN."""


def of_operation(func: Any, args: Sequence[Any]) -> int:
    """Bytes that a product of matrices takes for copies of its factors."""
    if func in (aten.mm.default, aten.addmm.default):
        return sum(_nbytes(factor) for factor in args[-2:] if not _fits_blas(factor))
    if func in (aten.bmm.default, aten.baddbmm.default):
        first, second = args[-2:]
        large = first.numel() * second.size(-1) > LEAST_PRODUCT
        if large and first.dtype == torch.bfloat16 and _has_bf16_products():
            return sum(_nbytes(factor) for factor in (first, second) if not _fits_onednn(factor))
    return 0


@cache
def _has_bf16_products() -> bool:
    return bool(torch_patches.onednn_multiplies_bf16())


def _fits_blas(matrix: Tensor) -> bool:
    """Whether a factor is used as it is. addmm_impl_cpu_ clones one of which neither rows nor columns are
    contiguous."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return bool((right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)))


def _fits_onednn(batch: Tensor) -> bool:
    """Whether a batch is used as it is: is_mkldnn_optimized_format of mkldnn_matmul. A weight that meets a batch of
    single rows, repeated by a stride of 0, does not fit and is copied once for each row."""
    if batch.is_contiguous():
        return True
    (_, rows, columns), strides = batch.shape, batch.stride()
    return bool(strides[0] == rows * columns and strides[1] == 1 and strides[2] == rows)
