"""Causal attention over a packed row: each sequence by itself, exactly.

Two ways. `torch.nn.attention.varlen_attn` for 16-bit numbers on a GPU. Everywhere else torch's attention on one
sequence after the other, neighbours of equal length at once, and with a window on one block after the other, so that
the work grows with the length and not with its square. On a CPU more at once is not faster (docs/log.md).

Legend: T tokens of the row, N query heads and G key-value groups of this rank, D head dimension; B sequences of equal
length, L their length.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.kernels.backends import log_once
from megarlhf.parallel.packed_rows import PackedRow

log = logging.getLogger(__name__)

AttentionPath = Literal["varlen", "runs"]
LEAST_BLOCK = 64
"""Queries of a block. A call for fewer costs about as much."""


def packed_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """Softmax(Q K^T scale) V of each sequence by itself, over the past or over its last `window` tokens.

    Shapes:  [T, N, D], [T, G, D] twice, N a multiple of G -> [T, N, D]
    Numbers: `scale` None is 1 / sqrt(D); `window` counts the token itself, None is all of the past
    Checked: forward and backward against fp64, per sequence
    Raises:  ValueError on a GPU where this torch's `varlen_attn` cannot do it
    """
    sizes = {x.size(0) for x in (query_TND, key_TGD, value_TGD)}
    assert sizes == {row.num_tokens}, f"the row's sequences have {row.num_tokens} tokens in all, got {sizes}"
    path, why = attention_path(query_TND.device.type, query_TND.dtype, query_TND.size(2))
    log_once(log, f"attention over packed rows: {path} ({why})")
    if path == "varlen":
        return varlen_attention(query_TND, key_TGD, value_TGD, row, scale=scale, window=window)
    return attention_by_runs(query_TND, key_TGD, value_TGD, row, scale=scale, window=window)


def attention_path(device: str, dtype: torch.dtype, head_dim: int) -> tuple[AttentionPath, str]:
    """Which way a packed row goes, and why."""
    if device == "cpu":
        return "runs", "varlen_attn has no kernel for a CPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "runs", f"varlen_attn takes fp16 and bf16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return "runs", f"varlen_attn takes head dimensions up to 256 in steps of 8, not {head_dim}"
    return "varlen", "fp16 or bf16 on a GPU"


def attention_by_runs(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """As `packed_attention`, by calls of torch's own attention for each run of sequences of equal length.

    The runs are views of the row; nothing is padded or gathered.
    """
    runs = [(length, len(list(run))) for length, run in itertools.groupby(row.lengths)]
    inputs = [x.split([count * length for length, count in runs]) for x in (query_TND, key_TGD, value_TGD)]
    how: dict[str, Any] = {"scale": scale, "enable_gqa": query_TND.size(1) != key_TGD.size(1)}
    parts = []
    for (length, count), *run in zip(runs, *inputs, strict=True):
        query, key, value = (x.unflatten(0, (count, length)) for x in run)
        if window is None or length <= window:
            parts.append(_attend(query, key, value, is_causal=True, **how).flatten(0, 1))
        else:
            blocks = (_attend(*block, attn_mask=band, **how) for *block, band in _blocks(query, key, value, window))
            parts.append(torch.cat(list(blocks), 1).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend(query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, **how: Any) -> Tensor:
    """torch's attention on [B, L, ...]: its output is [B, L, N, D] in memory too."""
    query, key, value = (x.transpose(1, 2) for x in (query_BLND, key_BLGD, value_BLGD))
    return scaled_dot_product_attention(query, key, value, **how).transpose(1, 2)


def _blocks(
    query_BLND: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, window: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Queries block by block, each with the keys and values of itself and the window - 1 tokens before, and its mask.

    A block is about half a window: of the scores that are computed a third is then masked away, besides the corners.
    """
    size = max(LEAST_BLOCK, math.ceil(window / 2))
    reach = window - 1
    queries, keys, values = (x.split(size, 1) for x in (query_BLND, key_BLGD, value_BLGD))
    # Line i of a block sees column i to i + reach, counted from `reach` tokens before the block.
    band = torch.ones(size, size + reach, dtype=torch.bool, device=query_BLND.device).tril(reach).triu()
    band = torch.zeros(band.shape, dtype=query_BLND.dtype, device=band.device).masked_fill_(~band, -math.inf)
    for number, query in enumerate(queries):
        before = min(number * size, reach)
        yield (
            query,
            _with_before(keys, number, before),
            _with_before(values, number, before),
            band[: query.size(1), reach - before : reach + query.size(1)],
        )


def _with_before(blocks: tuple[Tensor, ...], number: int, before: int) -> Tensor:
    """Block `number` behind the last `before` tokens of those in front of it. [B, before + L, G, D]"""
    parts = [blocks[number]]
    while before > 0:
        number -= 1
        parts.insert(0, blocks[number][:, -before:])
        before -= blocks[number].size(1)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def varlen_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """As `packed_attention`, by one call of `torch.nn.attention.varlen_attn`."""
    cu_seqlens, max_seqlen = row.cu_seqlens_q, row.max_seqlen_q
    return _varlen_attn()(
        *(query_TND, key_TGD, value_TGD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        # (tokens to the left, tokens to the right); -1 is all of them.
        window_size=(-1 if window is None else window - 1, 0),
        scale=scale,
        enable_gqa=query_TND.size(1) != key_TGD.size(1),
    )


@cache
def _varlen_attn() -> Callable[..., Tensor]:
    """torch's own; older versions of it know no window, scale or query groups."""
    wanted = {"window_size", "scale", "enable_gqa"}
    varlen = importlib.import_module("torch.nn.attention.varlen") if find_spec("torch.nn.attention.varlen") else None
    if varlen is None or not wanted <= inspect.signature(varlen.varlen_attn).parameters.keys():
        raise ValueError(
            f"torch {torch.__version__} has no varlen_attn that takes {', '.join(sorted(wanted))}, which packed rows "
            "need on a GPU; install torch 2.13, or transformer-engine"
        )
    return varlen.varlen_attn
