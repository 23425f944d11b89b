"""What the rank processes do to show how log-probs are made: with which code, and with which memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarlhf.kernels import reference
from megarlhf.parallel import step
from megarlhf.runtime import Runtime


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, in a forward or a backward.

    Not covered: memory that an operation takes and gives back before it returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return results


def with_calls_of_the_reference(runtime: Runtime, job: str, *args: Any) -> tuple[Any, int]:
    """Another job's result, and how often it asked `reference.py` for log-probs from hidden states."""
    from tests.distributed import jobs

    with mock.patch.object(reference, "linear_token_logprobs", wraps=reference.linear_token_logprobs) as spy:
        result = getattr(jobs, job)(runtime, *args)
    return result, spy.call_count


def largest_tensor(runtime: Runtime, job: str, columns: int, *args: Any) -> float:
    """Another job's largest tensor in all forwards and backwards of its models, as a share of the logits: response
    tokens of its smallest micro-batch x `columns`, the vocabulary columns of a rank."""
    from tests.distributed import jobs

    original: Callable[..., list[Any]] = step._run
    recorder = LargestTensor()
    response_tokens: list[int] = []

    def run(module: Any, mesh: Any, batches: Sequence[step.MicroBatch], *more: Any, **options: Any) -> list[Any]:
        masks = [batch.columns["response_mask"] for batch in batches if "response_mask" in batch.columns]
        response_tokens.extend(int(mask_BS.sum()) for mask_BS in masks)
        with recorder:
            return original(module, mesh, batches, *more, **options)

    with mock.patch.object(step, "_run", run):
        getattr(jobs, job)(runtime, *args)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    return recorder.elements / (min(response_tokens) * columns)
