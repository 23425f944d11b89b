"""Stand-in for TransformerEngine's context parallelism, in which keys and values go round the ranks of the group.

Source: transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P, without
fp8, with cuDNN's kernels. Each step attends to the keys of one rank: to its own causally; to those of ranks before it,
all of its queries to the first half; to those of ranks behind it, the second half of its queries to all. Partial
outputs are kept until all are there, so that the last rank's peak is the highest. For the backward it keeps its
queries, the keys and values that it received last, output and statistics.

Legend: T' tokens of this rank, N query heads and G key-value groups of this rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.rehearsal.fake_device.fused import pass_over
from megarlhf.rehearsal.fake_device.torch_patches import varlen_attn, varlen_attn_backward

ALL, PAST = [-1, -1], [-1, 0]


def ring_attention(
    query_TND: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    group: dist.ProcessGroup,
    *,
    scale: float | None,
    padded: bool,
) -> Tensor:
    """[T', N, D], [T', G, D] twice -> [T', N, D].

    cu_seqlens, longest: of whole sequences.
    padded: whether partial outputs are summed in fp32, as for rows that are not packed.
    """
    out_TND: Tensor = _Ring.apply(query_TND, key_TGD, value_TGD, cu_seqlens, longest, group, scale, padded)
    return out_TND


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        group: dist.ProcessGroup,
        scale: float | None,
        padded: bool,
    ) -> Tensor:
        cp = group.size()
        ctx.group, ctx.scale, ctx.shape, ctx.longest = group, scale, key.shape, longest // cp
        begins, halves = cu_seqlens // cp, cu_seqlens // (2 * cp)
        buffers = [torch.cat([key.reshape(-1), value.reshape(-1)])]
        outputs, statistics, states = [], [], []
        messages: Sequence[dist.Work] = ()
        for step in range(cp):
            _wait(messages)
            if step < cp - 1:
                buffers.append(torch.empty_like(buffers[step]))
                messages = _exchange(buffers[step], buffers[step + 1], group)
            inputs, cu, most, causal = _seen(ctx, step, query, buffers[step], begins, halves)
            out, lse, state = varlen_attn(
                *(*inputs, *cu, *most, causal, scale, PAST if causal else ALL, query.size(1) != key.size(1))
            )
            outputs.append(out)
            statistics.append(lse)
            states.append(state)
        total = statistics[0].clone()
        pass_over(statistics, [total])
        output = torch.zeros_like(query, dtype=torch.float32 if padded else query.dtype)
        for out, lse in zip(outputs, statistics, strict=True):
            pass_over([out, lse, total], [output])
        output = output.to(query.dtype)
        ctx.save_for_backward(query, buffers[-1], output, total, begins, halves, *states)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, both, output, total, begins, halves, *states = ctx.saved_tensors
        cp, gradient = ctx.group.size(), gradients[0].contiguous()
        to_query = torch.empty_like(query)
        buffers = [both.new_empty(2, *both.shape) for _ in range(2)]
        buffers[0][0].copy_(both)
        messages: Sequence[dist.Work] = ()
        for number in range(cp):
            _wait(messages)
            step = cp - 1 - number
            # Keys and values first, then with their gradients, in the end these alone.
            parts = slice(0, 1) if number == 0 else slice(1, 2) if step == 0 else slice(0, 2)
            here, there = buffers[number % 2], buffers[(number + 1) % 2]
            messages = _exchange(here[parts], there[parts], ctx.group)
            inputs, cu, most, causal = _seen(ctx, step, query, here[0], begins, halves)
            short = inputs[0].size(0) < query.size(0)
            out, grad, lse = (
                [_half(x) for x in (output, gradient)] + [total[:, total.size(1) // 2 :].contiguous()]
                if short
                else [output, gradient, total]
            )
            step_gradients = varlen_attn_backward(
                *(grad, *inputs, out, lse, *cu, *most, causal, states[step], ctx.scale, PAST if causal else ALL)
            )
            pass_over([step_gradients[0]], [to_query])
            _wait(messages)
            messages = ()
            pass_over([*step_gradients[1:]], [there[1]])
            del inputs, out, grad, lse, step_gradients
        _wait(messages)
        last = buffers[cp % 2][1]
        to_key, to_value = (part.view(ctx.shape) for part in last.chunk(2))
        return to_query, to_key, to_value, None, None, None, None, None


def _seen(
    ctx: Any, step: int, query: Tensor, both: Tensor, begins: Tensor, halves: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], tuple[int, int], bool]:
    """Query, key and value of a step; beginnings of sequences in queries and in keys; the longest of each; whether
    attention is causal."""
    key, value = (part.view(ctx.shape) for part in both.chunk(2))
    if step == 0:
        return (query, key, value), (begins, begins), (ctx.longest, ctx.longest), True
    if step <= ctx.group.rank():
        return (query, _half(key), _half(value)), (begins, halves), (ctx.longest, ctx.longest // 2), False
    return (_half(query), key, value), (halves, begins), (ctx.longest // 2, ctx.longest), False


def _half(x_TND: Tensor) -> Tensor:
    """A copy of half of each sequence."""
    half_TND = x_TND.new_empty(x_TND.size(0) // 2, *x_TND.shape[1:])
    pass_over([x_TND], [half_TND])
    return half_TND


def _exchange(own: Tensor, received: Tensor, group: dist.ProcessGroup) -> Sequence[dist.Work]:
    size, rank = group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    sent = dist.isend(own, ranks[(rank + 1) % size], group=group)
    taken = dist.irecv(received, ranks[(rank - 1) % size], group=group)
    return [work for work in (sent, taken) if work is not None]


def _wait(messages: Sequence[dist.Work]) -> None:
    for message in messages:
        message.wait()
