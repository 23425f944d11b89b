"""Memory that a CPU takes inside an operation, where no dispatcher sees it: a table, with where each formula is from.

Read in torch 2.13, `torch/csrc/distributed/c10d/ProcessGroupGloo.cpp`. What gloo itself takes (`gloo/allreduce.cc` has
a buffer of segments) is no memory of torch's allocator, and is in no figure here. On a GPU, NCCL's buffers are made
when a communicator is and are part of the stated margin instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten


def _nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_flatten(tensors)[0] if isinstance(x, Tensor))


def _whole(args: Sequence[Any]) -> int:
    return _nbytes(args[0])


def _whole_and_joined(args: Sequence[Any]) -> int:
    return _nbytes(args[0]) + _joined(args[1])


def _joined(tensors: Any) -> int:
    """`flattenDenseTensors` copies where there are several."""
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
"""Bytes by torch's operation of `torch.ops.c10d`, from its arguments."""


def of_message(name: str, args: Sequence[Any]) -> int:
    """Bytes that gloo's process group takes for a message, from when it is issued until it is done."""
    formula = GLOO.get(name)
    return 0 if formula is None else formula(args)
