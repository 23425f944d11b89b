"""Attention to the past of queries whose last stands where the last key does: what rows of every kind are made of.

Legend: T tokens of queries and S of keys end to end, N query heads and G key-value groups of this rank, D head
dimension; B sequences of equal length, L their length.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.parallel.packing.trees import Borders

AttentionPath = Literal["varlen", "runs"]
LEAST_BLOCK = 64
"""Queries of a block. A call for fewer costs about as much."""


def attention_path(device: str, dtype: torch.dtype, head_dim: int) -> tuple[AttentionPath, str]:
    """Which way a packed row goes, and why."""
    if device == "cpu":
        return "runs", "varlen_attn has no kernel for a CPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "runs", f"varlen_attn takes fp16 and bf16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return "runs", f"varlen_attn takes head dimensions up to 256 in steps of 8, not {head_dim}"
    return "varlen", "fp16 or bf16 on a GPU"


def attend_to_the_past(
    query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, window: int | None, **how: Any
) -> Tensor:
    """Of queries whose last stands where the last key does, with as many keys or more. [B, L, N, D]

    Without a stored matrix of all pairs where there are as many keys as queries and no window that bites; otherwise
    block by block of queries, each with a mask.
    """
    length = key_BLGD.size(1)
    if window is not None and length > window:
        blocks = _blocks(query_BLND, key_BLGD, value_BLGD, window)
    elif length > query_BLND.size(1):
        blocks = _growing_blocks(query_BLND, key_BLGD, value_BLGD)
    else:
        return _attend(query_BLND, key_BLGD, value_BLGD, is_causal=True, **how)
    return torch.cat([_attend(*block, attn_mask=band, **how) for *block, band in blocks], 1)


def _attend(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, **how: Any) -> Tensor:
    """torch's attention on [B, L, ...]: its output is [B, L, N, D] in memory too."""
    query, key, value = (x.transpose(1, 2) for x in (query_BLND, key_BLGD, value_BLGD))
    return scaled_dot_product_attention(query, key, value, **how).transpose(1, 2)


Block = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, the keys and values that they may see, and what is added to the scores: 0, or -inf for pairs not seen."""


def _growing_blocks(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor) -> Iterator[Block]:
    """Queries block by block, each with all keys and values up to its own last. These are views.

    A block is an eighth of the queries: a sixteenth of their own square is computed in vain, and masks are small.
    """
    length, past = query_BLND.size(1), key_BLGD.size(1) - query_BLND.size(1)
    size = max(LEAST_BLOCK, math.ceil(length / 8))
    for number, query in enumerate(query_BLND.split(size, 1)):
        before = past + number * size
        end = before + query.size(1)
        seen = torch.ones(query.size(1), end, dtype=torch.bool, device=query.device).tril(before)
        yield query, key_BLGD[:, :end], value_BLGD[:, :end], _added(seen, query.dtype)


def _blocks(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, window: int) -> Iterator[Block]:
    """Queries block by block, each with the keys and values of itself and the window - 1 tokens before.

    A block is about half a window: of the scores that are computed a third is then masked away, besides the corners.
    """
    length, past = query_BLND.size(1), key_BLGD.size(1) - query_BLND.size(1)
    size = max(LEAST_BLOCK, math.ceil(window / 2))
    reach = window - 1
    cut = [past] * (past > 0) + [min(size, length - at) for at in range(0, length, size)]
    keys, values = (x.split(cut, 1) for x in (key_BLGD, value_BLGD))
    # Line i of a block sees column i to i + reach, counted from `reach` tokens before the block.
    seen = torch.ones(size, size + reach, dtype=torch.bool, device=query_BLND.device).tril(reach).triu()
    band = _added(seen, query_BLND.dtype)
    for number, query in enumerate(query_BLND.split(size, 1)):
        before = min(past + number * size, reach)
        at = number + (past > 0)
        yield (
            query,
            _with_before(keys, at, before),
            _with_before(values, at, before),
            band[: query.size(1), reach - before : reach + query.size(1)],
        )


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def _with_before(blocks: tuple[Tensor, ...], number: int, before: int) -> Tensor:
    """Block `number` behind the last `before` tokens of those in front of it. [B, before + L, G, D]"""
    parts = [blocks[number]]
    while before > 0:
        number -= 1
        parts.insert(0, blocks[number][:, -before:])
        before -= blocks[number].size(1)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def varlen(
    query_TND: Tensor, key_SGD: Tensor, value_SGD: Tensor, borders: Borders, *, scale: float | None, window: int | None
) -> Tensor:
    """One call of `torch.nn.attention.varlen_attn`, which aligns the last query of a sequence with its last key.
    [T, N, D], [S, G, D] twice -> [T, N, D]"""
    attend, says_groups = _varlen_attn()
    return attend(
        *(query_TND, key_SGD, value_SGD, *borders),
        # (tokens to the left, tokens to the right); -1 is all of them.
        window_size=(-1 if window is None else window - 1, 0),
        scale=scale,
        **({"enable_gqa": query_TND.size(1) != key_SGD.size(1)} if says_groups else {}),
    )


@cache
def _varlen_attn() -> tuple[Callable[..., Tensor], bool]:
    """torch's own, and whether it wants to be told of query groups: before 2.13 it does not ask, and its kernel takes
    them. Still older versions know no window or scale."""
    wanted = {"window_size", "scale"}
    varlen = importlib.import_module("torch.nn.attention.varlen") if find_spec("torch.nn.attention.varlen") else None
    known = set() if varlen is None else inspect.signature(varlen.varlen_attn).parameters.keys()
    if varlen is None or not wanted <= known:
        raise ValueError(
            f"torch {torch.__version__} has no varlen_attn that takes {', '.join(sorted(wanted))}, which packed rows "
            "need on a GPU; install torch 2.13, or transformer-engine"
        )
    return varlen.varlen_attn, "enable_gqa" in known
