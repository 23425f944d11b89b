"""Attention over a packed row whose segments continue others: each sees its own past and all of its ancestors.

Two ways, exactly the same but for rounding.

*Merged*: a kernel for each segment with itself, and one for all that continues a segment, at one level, with all of
that segment; the parts are merged by their log-sum-exp. Softmax over a union of keys is the mean of the softmax over
each part, weighted by exp(log-sum-exp); and the gradient of a part follows from the *merged* output and log-sum-exp,
which its kernel's own backward takes instead of its own. So all of it is one autograd function: autograd's backward of
the kernels would leave out the gradient of their log-sum-exp. Nothing of the size of a prompt is copied.

*Plain*: each segment's keys behind a copy of those of its ancestors that it sees. For sliding windows that bite, for
numbers that have no kernel, and to compare with.

On a GPU the merged way calls the two kernels of torch's `varlen_attn`. A CPU has none of them: in tests a stand-in does
what the source of torch 2.11 and 2.13 says (torch/nn/attention/varlen.py); `make test-gpu` compares with fp64.

Legend: T tokens of the row, S keys in front of which copies stand, N query heads and G key-value groups of this rank, D
head dimension; L queries and K keys of a part; B blocks of equal shape.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.kernels.backends import log_once
from megarlhf.models.attention.past import attend_to_the_past, attention_path, varlen
from megarlhf.parallel.packing.rows import PackedRow
from megarlhf.parallel.packing.trees import QueryBlocks, Trees

log = logging.getLogger(__name__)


def tree_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """As `packed_attention`, of a row that has trees.

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
    """What the merged way calls, None for the plain way; and why."""
    if window is not None:
        return None, "a sliding window sees a part of what comes before"
    if device == "cpu":
        return CpuFlash(), "flash attention on a CPU"
    path, why = attention_path(device, dtype, head_dim)
    if path != "varlen":
        return None, why
    kernels = _varlen_kernels()
    if kernels is None:
        return None, f"torch {torch.__version__} has no varlen_attn whose backward takes what was merged; 2.11 has"
    return Varlen(*kernels), why


# --- merged ---------------------------------------------------------------------------------------


Inputs = tuple[Tensor, Tensor, Tensor]
"""Query [T, N, D], key and value [T, G, D] of the whole row, or their gradients; or those of a part."""


class Kernel(Protocol):
    """Attention over blocks of a row, forward and backward, with its log-sum-exp."""

    def calls(self, part: QueryBlocks) -> Sequence[QueryBlocks]:
        """A part as parts that one call takes each."""

    def forward(self, inputs: Inputs, part: QueryBlocks, how: How) -> tuple[Tensor, Tensor]:
        """Of the part: output [L, N, D], and log-sum-exp [L, N] in fp32 or fp64."""

    def backward(
        self, gradient: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, part: QueryBlocks, how: How
    ) -> Inputs:
        """The part's share of the gradients of its queries, keys and values, from the row's: the gradient, the output
        and the log-sum-exp of all that its queries see. What it gives for keys without queries may be anything."""


class How(NamedTuple):
    """Blocks are causal or full rectangles; None is a scale of 1 / sqrt(D)."""

    causal: bool
    scale: float | None


def merged_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, trees: Trees, kernel: Kernel, *, scale: float | None
) -> Tensor:
    """Over all of the past. [T, N, D], [T, G, D] twice -> [T, N, D]"""
    if torch.is_grad_enabled() and _is_alone(query_TND) and not _is_alone(value_TGD):
        value_TGD = value_TGD.contiguous()  # kept as a part, it would keep the projection of queries and keys with it
    # The kernels take strides, but not of the last axis.
    inputs = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_TND, key_TGD, value_TGD))
    out_TND: Tensor = _Merged.apply(*inputs, trees, kernel, scale)
    return out_TND


def _is_alone(x: Tensor) -> bool:
    """In its memory."""
    return x.untyped_storage().nbytes() <= x.nbytes


class _Merged(torch.autograd.Function):
    """Sums are in the order of `Trees`: what is near before what is far."""

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
        inputs, past, rectangle = (query, key, value), How(True, scale), How(False, scale)
        own = (kernel.forward(inputs, part, past) for part in kernel.calls(trees.own))
        out_TND, lse_TN = map(_joined, zip(*own, strict=True))
        for level in trees.levels:
            wide_LND = out_TND[level.queries].to(lse_TN.dtype)  # in 16 bits: rounded when all is merged
            for part in itertools.chain.from_iterable(map(kernel.calls, level.ancestors)):
                first = part.query - level.queries.start
                here = wide_LND[first : first + part.num_queries]
                merge_(here, lse_TN[part.queries], *kernel.forward(inputs, part, rectangle))
            if wide_LND.dtype != out_TND.dtype:
                out_TND[level.queries] = wide_LND
        ctx.save_for_backward(*inputs, out_TND, lse_TN)
        ctx.how = trees, kernel, past, rectangle
        return out_TND

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, out, lse = ctx.saved_tensors
        trees, kernel, past, rectangle = ctx.how
        row = gradient.contiguous(), tuple(inputs), out, lse
        own = zip(*(kernel.backward(*row, part, past) for part in kernel.calls(trees.own)), strict=True)
        # In 16 bits one addition is rounded once; of several each would be.
        dtype = lse.dtype if len(trees.levels) > 1 else out.dtype
        to_query, to_key, to_value = (_joined(parts).to(dtype) for parts in own)
        for part in itertools.chain.from_iterable(kernel.calls(x) for level in trees.levels for x in level.ancestors):
            query, key, value = kernel.backward(*row, part, rectangle)
            to_query[part.queries] += query
            for seen in part.seen:
                at = slice(part.key + seen.start, part.key + seen.stop)
                to_key[at] += key[seen]
                to_value[at] += value[seen]
        return *(x.to(out.dtype) for x in (to_query, to_key, to_value)), None, None, None


def _few_calls(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """On a CPU every operation passes through the mode of `parallel/megatron_cpu.py`, which takes as long as some of
    them. Nothing here names a device, which is what it looks for."""
    return torch._C.DisableTorchFunction() if x.device.type == "cpu" else contextlib.nullcontext()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def merge_(out_LND: Tensor, lse_LN: Tensor, other_LND: Tensor, other_lse_LN: Tensor) -> None:
    """Attention to some keys becomes, in place, that to others as well: softmax over a union."""
    both_LN = torch.logaddexp(lse_LN, other_lse_LN)
    share_LN1 = (other_lse_LN - both_LN).exp_().unsqueeze(-1)
    out_LND.lerp_(other_LND.to(out_LND.dtype), share_LN1)
    lse_LN.copy_(both_LN)


class CpuFlash:
    """torch's flash attention for a CPU, one call for blocks of equal shape. It takes views, and fewer key-value groups
    than heads."""

    def calls(self, part: QueryBlocks) -> Sequence[QueryBlocks]:
        return part.runs

    def forward(self, inputs: Inputs, part: QueryBlocks, how: How) -> tuple[Tensor, Tensor]:
        query, *keys = inputs
        blocks = (_queries(query, part), *(_keys(x, part) for x in keys))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = attend(*blocks, 0.0, how.causal, scale=how.scale)
        return _row(out), _row(lse)

    def backward(
        self, gradient: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, part: QueryBlocks, how: How
    ) -> Inputs:
        query, *keys = inputs
        blocks = (_queries(gradient, part), _queries(query, part), *(_keys(x, part) for x in keys))
        whole = _queries(out, part), _queries(lse, part)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        to_query, to_key, to_value = attend(*blocks, *whole, 0.0, how.causal, scale=how.scale)
        return _row(to_query), _row(to_key), _row(to_value)


def _queries(x_TN: Tensor, part: QueryBlocks) -> Tensor:
    return _blocks(x_TN, part.query, len(part.shapes), part.shapes[0].queries)


def _keys(x_TG: Tensor, part: QueryBlocks) -> Tensor:
    return _blocks(x_TG, part.key, len(part.shapes), part.shapes[0].keys)


def _blocks(x_TN: Tensor, first: int, count: int, length: int) -> Tensor:
    """[T, N, ...] -> [B, N, L, ...], a view: in one operation, since short segments take as long as three."""
    tokens, heads, *rest = x_TN.stride()
    strides = (length * tokens, heads, tokens, *rest)
    shape = (count, x_TN.size(1), length, *x_TN.shape[2:])
    return x_TN.as_strided(shape, strides, x_TN.storage_offset() + first * tokens)


def _row(x_BNL: Tensor) -> Tensor:
    """[B, N, L, ...] -> [B L, N, ...], a view of what the kernel made"""
    return x_BNL.transpose(1, 2).flatten(0, 1)


class Varlen:
    """The two kernels of torch's `varlen_attn`, one call for blocks of any shape. They are private: see the head of
    this file.

    says_groups: the forward asks whether there are fewer key-value groups than heads. The one before 2.13 takes them
    unasked.
    """

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], says_groups: bool = True) -> None:
        self._forward, self._backward, self._says_groups = forward, backward, says_groups

    def calls(self, part: QueryBlocks) -> Sequence[QueryBlocks]:
        return (part,)

    def forward(self, inputs: Inputs, part: QueryBlocks, how: How) -> tuple[Tensor, Tensor]:
        query, key, value = _cut(inputs, part)
        grouped = (query.size(1) != key.size(1),) if self._says_groups else ()
        # For a longest of one query and fewer groups than heads, the kernel takes it that all blocks have one.
        borders = part.borders._replace(longest_query=max(2, part.borders.longest_query))
        options = (how.causal, how.scale, _window(how.causal), *grouped)
        out, lse_NL, _ = self._forward(query, key, value, *borders, *options)
        expected, got = (query.size(1), query.size(0)), tuple(lse_NL.shape)
        assert got == expected, f"varlen_attn's log-sum-exp is [heads, queries] = {expected}, got {got}"
        return out, lse_NL.t()

    def backward(
        self, gradient: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, part: QueryBlocks, how: How
    ) -> Inputs:
        gradient, out, lse_LN = (x[part.queries] for x in (gradient, out, lse))
        state = torch.zeros(2, dtype=torch.uint64, device=out.device)  # of a dropout that there is not
        found: Inputs = self._backward(
            *(gradient, *_cut(inputs, part), out, lse_LN.t().contiguous(), *part.borders),
            *(how.causal, state, how.scale, _window(how.causal)),
        )
        return found


def _cut(inputs: Inputs, part: QueryBlocks) -> Inputs:
    query, key, value = inputs
    return query[part.queries], key[part.keys], value[part.keys]


def _window(causal: bool) -> list[int]:
    """(tokens to the left, tokens to the right); -1 is all of them."""
    return [-1, 0] if causal else [-1, -1]


FORWARD = "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size"
GROUPED = "enable_gqa"
"""The next one, since 2.13."""
BACKWARD = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
"""The arguments of the kernels of torch 2.11 to 2.13 in their order, as far as they are given here."""


@cache
def _varlen_kernels() -> tuple[Callable[..., Any], Callable[..., Any], bool] | None:
    """torch's own, and whether the first wants to be told of query groups; None where there are none, or others."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    importlib.import_module("torch.nn.attention.varlen")
    ops: list[Any] = [getattr(torch.ops.torch_attn, name, None) for name in ("_varlen_attn", "_varlen_attn_backward")]
    names = [[] if op is None else [argument.name for argument in op.default._schema.arguments] for op in ops]
    for found, wanted in zip(names, (FORWARD, BACKWARD), strict=True):
        if found[: len(wanted.split())] != wanted.split():
            return None
    return ops[0], ops[1], names[0][len(FORWARD.split()) :][:1] == [GROUPED]


# --- plain ----------------------------------------------------------------------------------------


def plain_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, trees: Trees, *, scale: float | None, window: int | None
) -> Tensor:
    """Over all of the past or its last `window` tokens. [T, N, D], [T, G, D] twice -> [T, N, D]"""
    pasts = trees.pasts(window)
    key_SGD, value_SGD = (_behind_their_pasts(x, trees.lengths, pasts.pieces) for x in (key_TGD, value_TGD))
    if attention_path(query_TND.device.type, query_TND.dtype, query_TND.size(2))[0] == "varlen":
        return varlen(query_TND, key_SGD, value_SGD, pasts.borders, scale=scale, window=window)
    runs = [(shape, len(list(run))) for shape, run in itertools.groupby(pasts.shapes)]
    queries = query_TND.split([count * shape.queries for shape, count in runs])
    keys, values = (x.split([count * shape.keys for shape, count in runs]) for x in (key_SGD, value_SGD))
    how: dict[str, Any] = {"scale": scale, "enable_gqa": query_TND.size(1) != key_TGD.size(1)}
    parts = []
    for (_, count), *run in zip(runs, queries, keys, values, strict=True):
        query, key, value = (x.unflatten(0, (count, -1)) for x in run)
        parts.append(attend_to_the_past(query, key, value, window, **how).flatten(0, 1))
    return _joined(parts)


def _behind_their_pasts(x_TGD: Tensor, lengths: Sequence[int], pieces: Sequence[tuple[int, int]]) -> Tensor:
    """[T, G, D] -> [S, G, D]. Not by an index, whose backward would add in any order on a GPU."""
    segments = x_TGD.split(lengths)
    return torch.cat([segments[n] if kept == lengths[n] else segments[n][-kept:] for n, kept in pieces])
