"""Patches of Megatron-Core, with the reason for each:

_ParamAndGradBucketGroup.__init__,        sums of gradients begin and gathers of weights end in the middle of
start_grad_sync, finish_param_sync        what is recorded on tapes (`buckets.py`)
tensor_parallel.checkpoint                recomputation is told from the first computation
torch.optim.AdamW,                        the optimizer as it is on a GPU, with TransformerEngine or without
multi_tensor_scale_impl, l2_norm_impl     (`optimizer.py`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as mixed_precision

TAKERS: Mapping[str, tuple[ModuleType, ...]] = {
    "multi_tensor_scale_impl": (clip_grads, mixed_precision),
    "l2_norm_impl": (clip_grads,),
}
"""Modules of Megatron-Core that have imported a kernel under this name."""


class OptimizerKernels(NamedTuple):
    """Kernels of Megatron-Core's optimizer."""

    adam: type[torch.optim.AdamW]
    of_many: Mapping[str, Callable[..., Any]]
    """Kernels for many tensors at once in place of Megatron-Core's loops, by its name."""


@contextlib.contextmanager
def megatron_patched(
    buckets: Any, recomputing: Callable[[bool], None], optimizer: OptimizerKernels | None
) -> Iterator[None]:
    """Scope of the patches.

    buckets:     a `buckets.Buckets`, which handles Megatron-Core's buckets and their messages
    recomputing: called with True when a forward begins whose results were not kept for the backward, with False at its
    end
    optimizer:   in place of Megatron-Core's choice; None keeps that
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(tensor_parallel, "checkpoint", _checkpoint(recomputing)))
        for name, method in _bucket_methods(buckets).items():
            stack.enter_context(patch.object(_ParamAndGradBucketGroup, name, method))
        if optimizer is not None:
            stack.enter_context(patch.object(torch.optim, "AdamW", optimizer.adam))
            for name, kernel in optimizer.of_many.items():
                for module in TAKERS[name]:
                    stack.enter_context(patch.object(module, name, kernel))
        yield


def _bucket_methods(buckets: Any) -> dict[str, Callable[..., None]]:
    make, start = _ParamAndGradBucketGroup.__init__, _ParamAndGradBucketGroup.start_grad_sync
    finish = _ParamAndGradBucketGroup.finish_param_sync

    def make_buckets(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        buckets.register(self)

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        with buckets.unrecorded():
            start(self, *args, **kwargs)

    def finish_param_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        with buckets.unrecorded():
            finish(self, *args, **kwargs)

    return {"__init__": make_buckets, "start_grad_sync": start_grad_sync, "finish_param_sync": finish_param_sync}


def _checkpoint(recomputing: Callable[[bool], None]) -> Callable[..., Any]:
    checkpoint = tensor_parallel.checkpoint

    def observed_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
        calls = 0

        def observed(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                return function(*inputs)
            recomputing(True)
            try:
                return function(*inputs)
            finally:
                recomputing(False)

        return checkpoint(observed, *args)

    return observed_checkpoint
