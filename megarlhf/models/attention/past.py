"""Causal attention with aligned ends: the last query stands at the last key. All other kinds of attention use it.

Legend: T query tokens and S key tokens end to end, N query heads and G key-value groups of this rank, D head dimension;
B sequences of equal length L.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.parallel.packing.trees import Borders

AttentionPath = Literal["varlen", "runs"]
LEAST_BLOCK = 64
"""Least number of queries in a block. A call for fewer costs about as much."""


def attention_path(device: str, dtype: torch.dtype, head_dim: int) -> tuple[AttentionPath, str]:
    """Choose the implementation for packed rows; returns it and the reason."""
    if device == "cpu":
        return "runs", "varlen_attn has no kernel for a CPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "runs", f"varlen_attn takes fp16 and bf16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return "runs", f"varlen_attn takes head dimensions up to 256 in steps of 8, not {head_dim}"
    return "varlen", "fp16 or bf16 on a GPU"


def attend_to_the_past(
    query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention where the last query stands at the last key; there are as many keys as queries or more.
    -> [B, L, N, D]

    One call without a stored mask where there are as many keys as queries and the window is not shorter. Otherwise
    block by block of queries, each with a mask.
    """
    length = key_BLGD.size(1)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query_BLND.size(2) != key_BLGD.size(2)}
    if window is not None and length > window:
        blocks = _blocks(query_BLND, key_BLGD, value_BLGD, window)
    elif length > query_BLND.size(1):
        blocks = _growing_blocks(query_BLND, key_BLGD, value_BLGD)
    else:
        return _attend(query_BLND, key_BLGD, value_BLGD, is_causal=True, **options)
    return torch.cat([_attend(*block, attn_mask=bias, **options) for *block, bias in blocks], 1)


def attend_by_runs(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    shapes: Sequence[tuple[int, int]],
    query_TND: Tensor,
    key_SGD: Tensor,
    value_SGD: Tensor,
) -> Tensor:
    """Attention of sequences that stand end to end, by one call of `attend` for each run of neighbours of equal shape.

    `shapes`: numbers of queries and keys of each sequence. [T, N, D], [S, G, D] twice -> [T, N, D]
    """
    runs = [(*shape, len(list(run))) for shape, run in itertools.groupby(shapes)]
    queries = query_TND.split([count * num_queries for num_queries, _, count in runs])
    keys, values = (x.split([count * num_keys for _, num_keys, count in runs]) for x in (key_SGD, value_SGD))
    parts = []
    for (_, _, count), *run in zip(runs, queries, keys, values, strict=True):
        query, key, value = (x.unflatten(0, (count, -1)) for x in run)
        parts.append(attend(query, key, value).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, **options: Any) -> Tensor:
    """torch's attention on [B, L, ...]. The output is contiguous as [B, L, N, D]."""
    query, key, value = (x.transpose(1, 2) for x in (query_BLND, key_BLGD, value_BLGD))
    return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


Block = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, the keys and values that they may see, and the bias added to the scores: 0, or -inf for pairs not seen."""


def _growing_blocks(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor) -> Iterator[Block]:
    """Queries block by block, each with all keys and values up to its own last one, as views.

    A block is an eighth of the queries. Then a sixteenth of the square of queries is computed in vain, and masks are
    small.
    """
    length, past = query_BLND.size(1), key_BLGD.size(1) - query_BLND.size(1)
    size = max(LEAST_BLOCK, math.ceil(length / 8))
    for n, query in enumerate(query_BLND.split(size, 1)):
        before = past + n * size
        end = before + query.size(1)
        seen = torch.ones(query.size(1), end, dtype=torch.bool, device=query.device).tril(before)
        yield query, key_BLGD[:, :end], value_BLGD[:, :end], _bias(seen, query.dtype)


def _blocks(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, window: int) -> Iterator[Block]:
    """Queries block by block, each with the keys and values of itself and of the window - 1 tokens before.

    A block is about half a window. Then a third of the computed scores is masked away, besides the corners.
    """
    length, past = query_BLND.size(1), key_BLGD.size(1) - query_BLND.size(1)
    size = max(LEAST_BLOCK, math.ceil(window / 2))
    reach = window - 1
    sizes = [past] * (past > 0) + [min(size, length - start) for start in range(0, length, size)]
    keys, values = (x.split(sizes, 1) for x in (key_BLGD, value_BLGD))
    # Row i of a block sees columns i to i + reach, counted from `reach` tokens before the block.
    seen = torch.ones(size, size + reach, dtype=torch.bool, device=query_BLND.device).tril(reach).triu()
    band = _bias(seen, query_BLND.dtype)
    for n, query in enumerate(query_BLND.split(size, 1)):
        before = min(past + n * size, reach)
        key, value = (_with_before(blocks, n + (past > 0), before) for blocks in (keys, values))
        yield query, key, value, band[: query.size(1), reach - before : reach + query.size(1)]


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def _with_before(blocks: tuple[Tensor, ...], n: int, before: int) -> Tensor:
    """Block `n` with the `before` tokens in front of it: [B, before + L, G, D]."""
    parts = [blocks[n]]
    while before > 0:
        n -= 1
        parts.insert(0, blocks[n][:, -before:])
        before -= blocks[n].size(1)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def varlen(
    query_TND: Tensor, key_SGD: Tensor, value_SGD: Tensor, borders: Borders, *, scale: float | None, window: int | None
) -> Tensor:
    """One call of `torch.nn.attention.varlen_attn`, which aligns the last query of a sequence with its last key.
    [T, N, D], [S, G, D] twice -> [T, N, D]"""
    attend, has_gqa_flag = _varlen_attn()
    return attend(
        *(query_TND, key_SGD, value_SGD, *borders),
        # (tokens to the left, tokens to the right); -1 is all of them.
        window_size=(-1 if window is None else window - 1, 0),
        scale=scale,
        **({"enable_gqa": query_TND.size(1) != key_SGD.size(1)} if has_gqa_flag else {}),
    )


@cache
def _varlen_attn() -> tuple[Callable[..., Tensor], bool]:
    """torch's `varlen_attn`, and whether it has the flag `enable_gqa`. Before 2.13 it has no flag, and its kernel takes
    query groups anyway. Still older versions have no window or scale."""
    needed = {"window_size", "scale"}
    varlen = importlib.import_module("torch.nn.attention.varlen") if find_spec("torch.nn.attention.varlen") else None
    parameters = set() if varlen is None else inspect.signature(varlen.varlen_attn).parameters.keys()
    if varlen is None or not needed <= parameters:
        raise ValueError(
            f"packed rows on a GPU need a varlen_attn that takes {', '.join(sorted(needed))}, and torch "
            f"{torch.__version__} has none; install torch 2.13, or transformer-engine"
        )
    return varlen.varlen_attn, "enable_gqa" in parameters
