"""Attention over a packed row whose segments continue others: a segment sees its own past and all of its ancestors.

There are two implementations with the same result but for rounding.

*Merged*: one kernel call for each segment with itself, and one for everything that continues a segment, at one level,
with all keys of that segment. The partial results are merged by their log-sum-exp: the softmax over a union of keys is
the mean of the partial softmaxes, weighted by exp(log-sum-exp). The gradient of a part follows from the *merged* output
and log-sum-exp; a kernel's backward gets these in place of its own. So everything is one autograd function: autograd's
backward of the kernels would leave out the gradient of their log-sum-exp. Nothing of the size of a prompt is copied.

*Plain*: each segment's keys stand behind a copy of those of its ancestors that it sees. It serves sliding windows
shorter than the longest sequence, dtypes without a kernel, and comparisons.

On a GPU the merged implementation calls the two kernels of torch's `varlen_attn`. A CPU has none of them: in tests a
stand-in follows the source of torch 2.11 and 2.13 (torch/nn/attention/varlen.py), and `make test-gpu` compares with
fp64.

Legend: T tokens of the row, S keys including copies of ancestors, N query heads and G key-value groups of this rank, D
head dimension; L queries and K keys of a part; B blocks of equal shape.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.kernels.backends import log_once
from megarlhf.models.attention.past import attend_by_runs, attend_to_the_past, attention_path, varlen
from megarlhf.parallel.packing.rows import PackedRow
from megarlhf.parallel.packing.trees import QueryBlocks, Trees

log = logging.getLogger(__name__)


def tree_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """`packed_attention` for a row that has trees.

    Checked: forward and backward of each sequence alone, against fp64 by hand
    """
    trees = row.trees
    if window is not None and window >= trees.longest:
        window = None
    kernel, why = kernel_for(query_TND.device.type, query_TND.dtype, query_TND.size(2), window)
    log_once(log, f"attention over rows of trees: {'plain' if kernel is None else 'merged'} ({why})")
    if kernel is None:
        return plain_attention(query_TND, key_TGD, value_TGD, trees, scale=scale, window=window)
    return merged_attention(query_TND, key_TGD, value_TGD, trees, kernel, scale=scale)


def kernel_for(device: str, dtype: torch.dtype, head_dim: int, window: int | None) -> tuple[Kernel | None, str]:
    """The kernel for the merged implementation, or None for the plain one; and the reason."""
    if window is not None:
        return None, "a sliding window sees only a part of what comes before"
    if device == "cpu":
        return CpuFlash(), "flash attention on a CPU"
    path, why = attention_path(device, dtype, head_dim)
    if path != "varlen":
        return None, why
    kernels = _varlen_kernels()
    if kernels is None:
        return None, f"torch {torch.__version__} has no varlen_attn whose backward takes merged results; 2.11 has"
    return Varlen(*kernels), why


# --- merged ---------------------------------------------------------------------------------------


Inputs = tuple[Tensor, Tensor, Tensor]
"""Query [T, N, D], key and value [T, G, D] of the whole row or of a part; or their gradients."""


class Kernel(Protocol):
    """Attention over blocks of a row, forward and backward, with its log-sum-exp."""

    def calls(self, part: QueryBlocks) -> Sequence[QueryBlocks]:
        """Split a part into parts for one kernel call each."""

    def forward(self, inputs: Inputs, part: QueryBlocks, mask: BlockMask) -> tuple[Tensor, Tensor]:
        """Output [L, N, D] of the part, and its log-sum-exp [L, N] in fp32 or fp64."""

    def backward(
        self, gradient: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, part: QueryBlocks, mask: BlockMask
    ) -> Inputs:
        """Gradients of the part's queries, keys and values. Gradient, output and log-sum-exp are the whole row's,
        merged over everything that the queries see. Results for keys without queries are undefined."""


class BlockMask(NamedTuple):
    """Shape of a block's attention (causal or a full rectangle), and the scale of scores. None is 1 / sqrt(D)."""

    causal: bool
    scale: float | None


def merged_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, trees: Trees, kernel: Kernel, *, scale: float | None
) -> Tensor:
    """Merged attention over all of the past. [T, N, D], [T, G, D] twice -> [T, N, D]"""
    if torch.is_grad_enabled() and _owns_storage(query_TND) and not _owns_storage(value_TGD):
        # Saved as a view, the values would keep the whole projection of queries and keys alive.
        value_TGD = value_TGD.contiguous()
    # The kernels take any strides but that of the last axis.
    inputs = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_TND, key_TGD, value_TGD))
    out_TND: Tensor = _Merged.apply(*inputs, trees, kernel, scale)
    return out_TND


def _owns_storage(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() <= x.nbytes


class _Merged(torch.autograd.Function):
    """Merged attention. Sums are in the order of `Trees`: near ancestors before far ones."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *more: Any) -> Tensor:
        with _few_calls(query):
            return _Merged._forward(ctx, query, *more)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with _few_calls(gradients[0]):
            return _Merged._backward(ctx, gradients[0])

    @staticmethod
    def _forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, trees: Trees, kernel: Kernel, scale: float | None
    ) -> Tensor:
        inputs, causal, full = (query, key, value), BlockMask(True, scale), BlockMask(False, scale)
        own = (kernel.forward(inputs, part, causal) for part in kernel.calls(trees.own))
        out_TND, lse_TN = map(_joined, zip(*own, strict=True))
        for level in trees.levels:
            wide_LND = out_TND[level.queries].to(lse_TN.dtype)  # 16 bits are rounded once, after all merges
            for part in itertools.chain.from_iterable(map(kernel.calls, level.ancestors)):
                first = part.query - level.queries.start
                merged_LND = wide_LND[first : first + part.num_queries]
                merge_(merged_LND, lse_TN[part.queries], *kernel.forward(inputs, part, full))
            if wide_LND.dtype != out_TND.dtype:
                out_TND[level.queries] = wide_LND
        ctx.save_for_backward(*inputs, out_TND, lse_TN)
        ctx.plan = trees, kernel, causal, full
        return out_TND

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        trees, kernel, causal, full = ctx.plan
        row = gradient.contiguous(), tuple(inputs), out, lse
        own = zip(*(kernel.backward(*row, part, causal) for part in kernel.calls(trees.own)), strict=True)
        # A single 16-bit addition is rounded once; several are made in the wider dtype of the log-sum-exp.
        dtype = lse.dtype if len(trees.levels) > 1 else out.dtype
        query_grad, key_grad, value_grad = (_joined(parts).to(dtype) for parts in own)
        for part in itertools.chain.from_iterable(kernel.calls(x) for level in trees.levels for x in level.ancestors):
            query, key, value = kernel.backward(*row, part, full)
            query_grad[part.queries] += query
            for seen in part.seen:
                in_row = slice(part.key + seen.start, part.key + seen.stop)
                key_grad[in_row] += key[seen]
                value_grad[in_row] += value[seen]
        return *(x.to(out.dtype) for x in (query_grad, key_grad, value_grad)), None, None, None


def _few_calls(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Scope that bypasses the TorchFunctionMode of `parallel/megatron_cpu.py` on a CPU. The mode takes as long as some
    of these operations, and looks for device arguments, which none of them has."""
    return torch._C.DisableTorchFunction() if x.device.type == "cpu" else contextlib.nullcontext()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def merge_(out_LND: Tensor, lse_LN: Tensor, other_LND: Tensor, other_lse_LN: Tensor) -> None:
    """Merge attention to some other keys into `out_LND` and `lse_LN`, in place: the softmax over both sets of keys."""
    both_LN = torch.logaddexp(lse_LN, other_lse_LN)
    share_LN1 = (other_lse_LN - both_LN).exp_().unsqueeze(-1)
    out_LND.lerp_(other_LND.to(out_LND.dtype), share_LN1)
    lse_LN.copy_(both_LN)


class CpuFlash:
    """torch's flash attention for a CPU: one call for blocks of equal shape. It takes views, and fewer key-value groups
    than heads."""

    def calls(self, part: QueryBlocks) -> Sequence[QueryBlocks]:
        return part.runs

    def forward(self, inputs: Inputs, part: QueryBlocks, mask: BlockMask) -> tuple[Tensor, Tensor]:
        query, *keys = inputs
        blocks = (_queries(query, part), *(_keys(x, part) for x in keys))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = attend(*blocks, 0.0, mask.causal, scale=mask.scale)
        return _row(out), _row(lse)

    def backward(
        self, gradient: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, part: QueryBlocks, mask: BlockMask
    ) -> Inputs:
        query, *keys = inputs
        blocks = (_queries(gradient, part), _queries(query, part), *(_keys(x, part) for x in keys))
        results = _queries(out, part), _queries(lse, part)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        query_grad, key_grad, value_grad = attend(*blocks, *results, 0.0, mask.causal, scale=mask.scale)
        return _row(query_grad), _row(key_grad), _row(value_grad)


def _queries(x_TN: Tensor, part: QueryBlocks) -> Tensor:
    return _blocks(x_TN, part.query, len(part.shapes), part.shapes[0].queries)


def _keys(x_TG: Tensor, part: QueryBlocks) -> Tensor:
    return _blocks(x_TG, part.key, len(part.shapes), part.shapes[0].keys)


def _blocks(x_TN: Tensor, first: int, count: int, length: int) -> Tensor:
    """[T, N, ...] -> [B, N, L, ...] as a view, in a single operation: three would take as long as a short segment."""
    tokens, heads, *rest = x_TN.stride()
    strides = (length * tokens, heads, tokens, *rest)
    shape = (count, x_TN.size(1), length, *x_TN.shape[2:])
    return x_TN.as_strided(shape, strides, x_TN.storage_offset() + first * tokens)


def _row(x_BNL: Tensor) -> Tensor:
    """[B, N, L, ...] -> [B L, N, ...], a view of a kernel's result."""
    return x_BNL.transpose(1, 2).flatten(0, 1)


class Varlen:
    """The two kernels of torch's `varlen_attn`: one call for blocks of any shape. They are private; see the docstring
    of this file.

    has_gqa_flag: the forward kernel has the argument `enable_gqa`. Kernels before 2.13 take query groups without it.
    """

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], has_gqa_flag: bool = True) -> None:
        self._forward, self._backward, self._has_gqa_flag = forward, backward, has_gqa_flag

    def calls(self, part: QueryBlocks) -> Sequence[QueryBlocks]:
        return (part,)

    def forward(self, inputs: Inputs, part: QueryBlocks, mask: BlockMask) -> tuple[Tensor, Tensor]:
        query, key, value = _slices(inputs, part)
        gqa = (query.size(1) != key.size(1),) if self._has_gqa_flag else ()
        # With a longest block of one query and fewer groups than heads, the kernel assumes one query in every block.
        borders = part.borders._replace(longest_query=max(2, part.borders.longest_query))
        options = (mask.causal, mask.scale, _window(mask.causal), *gqa)
        out, lse_NL, _ = self._forward(query, key, value, *borders, *options)
        expected, got = (query.size(1), query.size(0)), tuple(lse_NL.shape)
        assert got == expected, f"varlen_attn's log-sum-exp is [heads, queries] = {expected}, got {got}"
        return out, lse_NL.t()

    def backward(
        self, gradient: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, part: QueryBlocks, mask: BlockMask
    ) -> Inputs:
        gradient, out, lse_LN = (x[part.queries] for x in (gradient, out, lse))
        rng_state = torch.zeros(2, dtype=torch.uint64, device=out.device)  # unused: there is no dropout
        gradients: Inputs = self._backward(
            *(gradient, *_slices(inputs, part), out, lse_LN.t().contiguous(), *part.borders),
            *(mask.causal, rng_state, mask.scale, _window(mask.causal)),
        )
        return gradients


def _slices(inputs: Inputs, part: QueryBlocks) -> Inputs:
    query, key, value = inputs
    return query[part.queries], key[part.keys], value[part.keys]


def _window(causal: bool) -> list[int]:
    """(tokens to the left, tokens to the right); -1 is all of them."""
    return [-1, 0] if causal else [-1, -1]


FORWARD = "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size"
GROUPED = "enable_gqa"
"""Next argument of the forward since torch 2.13."""
BACKWARD = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
"""FORWARD and BACKWARD are the arguments of the kernels in torch 2.11 to 2.13, in their order, as far as we pass
them."""


@cache
def _varlen_kernels() -> tuple[Callable[..., Any], Callable[..., Any], bool] | None:
    """torch's forward and backward kernel, and whether the forward has the argument `enable_gqa`. None if this torch
    has no such kernels, or kernels with other arguments."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    importlib.import_module("torch.nn.attention.varlen")
    ops: list[Any] = [getattr(torch.ops.torch_attn, name, None) for name in ("_varlen_attn", "_varlen_attn_backward")]
    arguments = [[] if op is None else [argument.name for argument in op.default._schema.arguments] for op in ops]
    for actual, expected in zip(arguments, (FORWARD, BACKWARD), strict=True):
        if actual[: len(expected.split())] != expected.split():
            return None
    return ops[0], ops[1], arguments[0][len(FORWARD.split()) :][:1] == [GROUPED]


# --- plain ----------------------------------------------------------------------------------------


def plain_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, trees: Trees, *, scale: float | None, window: int | None
) -> Tensor:
    """Plain attention over all of the past or its last `window` tokens. [T, N, D], [T, G, D] twice -> [T, N, D]"""
    pasts = trees.pasts(window)
    key_SGD, value_SGD = (_with_pasts(x, trees.lengths, pasts.pieces) for x in (key_TGD, value_TGD))
    if attention_path(query_TND.device.type, query_TND.dtype, query_TND.size(2))[0] == "varlen":
        return varlen(query_TND, key_SGD, value_SGD, pasts.borders, scale=scale, window=window)
    attend = partial(attend_to_the_past, window=window, scale=scale)
    return attend_by_runs(attend, pasts.shapes, query_TND, key_SGD, value_SGD)


def _with_pasts(x_TGD: Tensor, lengths: Sequence[int], pieces: Sequence[tuple[int, int]]) -> Tensor:
    """Put each segment behind a copy of its past: [T, G, D] -> [S, G, D]. An index is not used: its backward would add
    in any order on a GPU."""
    segments = x_TGD.split(lengths)
    return torch.cat([segments[n] if kept == lengths[n] else segments[n][-kept:] for n, kept in pieces])
