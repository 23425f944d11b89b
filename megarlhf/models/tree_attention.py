"""Attention over a packed row whose segments continue others: each sees its own past and all of its ancestors.

Two ways, exactly the same but for rounding.

*Merged*: a kernel for each segment with itself, and one for all that continues a segment, at one level, with all of
that segment; the parts are merged by their log-sum-exp. Softmax over a union of keys is the mean of the softmax over
each part, weighted by exp(log-sum-exp); and the gradient of a part follows from the *merged* output and log-sum-exp,
which its kernel's own backward takes instead of its own. So all of it is one autograd function: autograd's backward of
the kernels would leave out the gradient of their log-sum-exp. Nothing of the size of a prompt is copied.

*Plain*: each segment's keys behind a copy of those of its ancestors that it sees. For sliding windows that bite, for
numbers that have no kernel, and to compare with.

The merged way on a GPU has not been run: its kernels are tested by what they are called with, against a stand-in that
does what torch 2.13's source says (torch/nn/attention/varlen.py).

Legend: T tokens of the row, S keys in front of which copies stand, N query heads and G key-value groups of this rank, D
head dimension; L queries and K keys of a part; B blocks of equal shape.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.kernels.backends import log_once
from megarlhf.models.past_attention import attend_to_the_past, attention_path, varlen
from megarlhf.parallel.packed_rows import PackedRow
from megarlhf.parallel.packed_trees import Part, Trees

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
        return None, f"torch {torch.__version__} has no varlen_attn whose backward takes what was merged; 2.13 has"
    return Varlen(*kernels), why


# --- merged ---------------------------------------------------------------------------------------


class Kernel(Protocol):
    """Attention over blocks, forward and backward, with its log-sum-exp."""

    def calls(self, part: Part) -> Sequence[Part]:
        """A part as parts that one call takes each."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """[L, N, D], [K, G, D] twice -> output [L, N, D], log-sum-exp [L, N] in fp32 or fp64"""

    def backward(
        self,
        gradient: Tensor,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        part: Part,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The part's share of the gradients of its queries, keys and values, from the gradient, the output and the
        log-sum-exp of all that its queries see. Those of keys that have no queries may be anything."""


Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


def merged_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, trees: Trees, kernel: Kernel, *, scale: float | None
) -> Tensor:
    """Over all of the past. [T, N, D], [T, G, D] twice -> [T, N, D]"""
    out_TND: Tensor = _Merged.apply(query_TND, key_TGD, value_TGD, trees, kernel, scale)
    return out_TND


class _Merged(torch.autograd.Function):
    """Sums are in the order of `Trees`: own part, then what is near, then what is far."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, trees: Trees, kernel: Kernel, scale: float | None
    ) -> Tensor:
        def attend(part: Part, causal: bool) -> tuple[Tensor, Tensor]:
            inputs = (query[part.queries], key[part.keys], value[part.keys])
            return kernel.forward(*inputs, part, causal=causal, scale=scale)

        out_TND, lse_TN = map(_joined, zip(*(attend(part, True) for part in kernel.calls(trees.own)), strict=True))
        for level in trees.levels:
            # In 16 bits: rounded once, when all is merged.
            wide_LND = out_TND[level.queries].to(lse_TN.dtype)
            for part in itertools.chain.from_iterable(map(kernel.calls, level.ancestors)):
                first = part.query - level.queries.start
                here = slice(first, first + part.queries.stop - part.query)
                merge_(wide_LND[here], lse_TN[part.queries], *attend(part, False))
            if wide_LND.dtype != out_TND.dtype:
                out_TND[level.queries] = wide_LND
        ctx.save_for_backward(query, key, value, out_TND, lse_TN)
        ctx.how = trees, kernel, scale
        return out_TND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        trees, kernel, scale = ctx.how
        gradient = gradient.contiguous()

        def share(part: Part, causal: bool) -> Inputs:
            inputs = query[part.queries], key[part.keys], value[part.keys]
            whole = out[part.queries], lse[part.queries]
            found: Inputs = kernel.backward(gradient[part.queries], inputs, *whole, part, causal=causal, scale=scale)
            return found

        parts = zip(*(share(part, True) for part in kernel.calls(trees.own)), strict=True)
        # One addition to a number is rounded once in 16 bits too; of more, each would be.
        dtype = lse.dtype if len(trees.levels) > 1 else query.dtype
        to_query, to_key, to_value = (_joined(part).to(dtype) for part in parts)
        for part in itertools.chain.from_iterable(kernel.calls(x) for level in trees.levels for x in level.ancestors):
            found = share(part, False)
            to_query[part.queries] += found[0]
            for seen in part.seen:
                at = slice(part.key + seen.start, part.key + seen.stop)
                to_key[at] += found[1][seen]
                to_value[at] += found[2][seen]
        return *(x.to(query.dtype) for x in (to_query, to_key, to_value)), None, None, None


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

    def calls(self, part: Part) -> Sequence[Part]:
        return part.runs

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        blocks = (_blocks(x, part) for x in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(*blocks, 0.0, causal, scale=scale)
        return _row(out), _row(lse)

    def backward(
        self,
        gradient: Tensor,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        part: Part,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = (_blocks(x, part) for x in (gradient, *inputs, out, lse))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        to_query, to_key, to_value = attend(*blocks, 0.0, causal, scale=scale)
        return _row(to_query), _row(to_key), _row(to_value)


def _blocks(x_TN: Tensor, part: Part) -> Tensor:
    """[B L, N, ...] -> [B, N, L, ...], a view"""
    return x_TN.unflatten(0, (len(part.shapes), -1)).transpose(1, 2)


def _row(x_BNL: Tensor) -> Tensor:
    """[B, N, L, ...] -> [B L, N, ...], a view of what the kernel made"""
    return x_BNL.transpose(1, 2).flatten(0, 1)


class Varlen:
    """The two kernels of torch's `varlen_attn`, one call for blocks of any shape. They are private, and have not been
    run here: see the head of this file."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self._forward, self._backward = forward, backward

    def calls(self, part: Part) -> Sequence[Part]:
        return (part,)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: Part, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        window, grouped = _window(causal), query.size(1) != key.size(1)
        out, lse_NL, _ = self._forward(query, key, value, *part.borders, causal, scale, window, grouped)
        expected = (query.size(1), query.size(0))
        assert lse_NL.shape == expected, (
            f"varlen_attn's log-sum-exp is [heads, queries] = {expected}, got {lse_NL.shape}"
        )
        return out, lse_NL.t()

    def backward(
        self,
        gradient: Tensor,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        part: Part,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Of the generator, for a dropout that there is not.
        state = torch.zeros(2, dtype=torch.uint64, device=out.device)
        found: Inputs = self._backward(
            *(gradient, *inputs, out, lse.t().contiguous(), *part.borders, causal, state, scale, _window(causal))
        )
        return found


def _window(causal: bool) -> list[int]:
    """(tokens to the left, tokens to the right); -1 is all of them."""
    return [-1, 0] if causal else [-1, -1]


FORWARD = "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size enable_gqa"
BACKWARD = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
"""The arguments of torch 2.13's kernels in their order, as far as they are given here."""


@cache
def _varlen_kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """torch's own; None where there are none, or others."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    importlib.import_module("torch.nn.attention.varlen")
    ops = [getattr(torch.ops.torch_attn, name, None) for name in ("_varlen_attn", "_varlen_attn_backward")]
    for op, wanted in zip(ops, (FORWARD, BACKWARD), strict=True):
        names = [] if op is None else [argument.name for argument in op.default._schema.arguments]
        if names[: len(wanted.split())] != wanted.split():
            return None
    return ops[0], ops[1]


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
