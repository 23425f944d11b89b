"""Causal attention over a packed row: each sequence by itself, exactly.

Two ways. `torch.nn.attention.varlen_attn` for 16-bit numbers on a GPU. Everywhere else torch's attention on one
sequence after the other, neighbours of equal length at once, and with a window on one block after the other, so that
the work grows with the length and not with its square. On a CPU more at once is not faster (docs/log.md).

Under context parallelism a rank has the queries of its share of the row, and gathers the keys and values of all of it.
Each of its chunks, two of a sequence, attends to the keys up to its own last one: in all ranks alike, and about 1 / cp
of the work.

Legend: T tokens of the row, T' this rank's (all of them without context parallelism), N query heads and G key-value
groups of this rank, D head dimension; B sequences of equal length, L their length, C that of a chunk.
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
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.kernels.backends import log_once
from megarlhf.parallel.context import ContextShare, gather_sequence
from megarlhf.parallel.packed_rows import PackedRow

log = logging.getLogger(__name__)

AttentionPath = Literal["varlen", "runs"]
LEAST_BLOCK = 64
"""Queries of a block. A call for fewer costs about as much."""


def packed_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """Softmax(Q K^T scale) V of each sequence by itself, over the past or over its last `window` tokens.

    Shapes:  [T', N, D], [T', G, D] twice, N a multiple of G -> [T', N, D]
    Numbers: `scale` None is 1 / sqrt(D); `window` counts the token itself, None is all of the past
    Checked: forward and backward against fp64, per sequence
    Raises:  ValueError on a GPU where this torch's `varlen_attn` cannot do it
    """
    sizes = {x.size(0) for x in (query_TND, key_TGD, value_TGD)}
    here = row.num_local_tokens
    assert sizes == {here}, f"the row's sequences have {here} tokens in all, got {sizes}"
    path, why = attention_path(query_TND.device.type, query_TND.dtype, query_TND.size(2))
    log_once(log, f"attention over packed rows: {path} ({why})")
    if row.share is not None:
        key_TGD, value_TGD = gather_keys(key_TGD, value_TGD, row.share.group, row.share)
    if path == "varlen":
        return varlen_attention(query_TND, key_TGD, value_TGD, row, scale=scale, window=window)
    if row.share is not None:
        return chunks_by_runs(query_TND, key_TGD, value_TGD, row, scale=scale, window=window)
    return attention_by_runs(query_TND, key_TGD, value_TGD, row, scale=scale, window=window)


def gather_keys(
    key_TGD: Tensor, value_TGD: Tensor, group: dist.ProcessGroup, share: ContextShare | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks in the order of the tokens, in one message each way. The same with a batch axis
    behind the tokens: [T', ..., G, D] twice -> [T, ..., G, D] twice."""
    both_TGD = gather_sequence(torch.cat([key_TGD, value_TGD], -2), group, share)
    key_TGD, value_TGD = both_TGD.chunk(2, -2)
    return key_TGD, value_TGD


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
        parts.append(attend_to_the_past(query, key, value, window, **how).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def chunks_by_runs(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """The same for this rank's chunks of each sequence. [T', N, D], [T, G, D] twice -> [T', N, D]"""
    assert row.share is not None
    group = row.share.group
    runs = [(length, len(list(run))) for length, run in itertools.groupby(row.lengths)]
    queries = query_TND.split([count * length // group.size() for length, count in runs])
    keys, values = (x.split([count * length for length, count in runs]) for x in (key_TGD, value_TGD))
    parts = []
    for (length, count), query, key, value in zip(runs, queries, keys, values, strict=True):
        context_BLND = chunks_attention(
            query.unflatten(0, (count, length // group.size())),
            *(x.unflatten(0, (count, length)) for x in (key, value)),
            cp=group.size(),
            rank=group.rank(),
            scale=scale,
            window=window,
        )
        parts.append(context_BLND.flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def chunks_attention(
    query_BLND: Tensor,
    key_BLGD: Tensor,
    value_BLGD: Tensor,
    *,
    cp: int,
    rank: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Sequences of equal length, of which the query has chunks `rank` and 2 cp - 1 - `rank` (`parallel/context.py`),
    key and value all. [B, L / cp, N, D], [B, L, G, D] twice -> [B, L / cp, N, D]"""
    how: dict[str, Any] = {"scale": scale, "enable_gqa": query_BLND.size(2) != key_BLGD.size(2)}
    size = key_BLGD.size(1) // (2 * cp)
    chunks = (rank, 2 * cp - 1 - rank)
    parts = []
    for chunk, query_BCND in zip(chunks, query_BLND.split(size, 1), strict=True):
        first = 0 if window is None else max(0, chunk * size - (window - 1))
        key, value = (x[:, first : (chunk + 1) * size] for x in (key_BLGD, value_BLGD))
        parts.append(attend_to_the_past(query_BCND, key, value, window, **how))
    return torch.cat(parts, 1)


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


def varlen_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """As `packed_attention`, by one call of `torch.nn.attention.varlen_attn`: also for the chunks of a share, each of
    them a sequence of queries with a copy of the keys up to its last, to which the kernel aligns the last query.

    A copy, since sequences of keys have to stand end to end: of T (1 + 1 / 2 cp) tokens in all.
    """
    cu_queries = cu_keys = row.cu_seqlens_q
    longest_query = longest_key = row.max_seqlen_q
    if row.share is not None:
        chunks = row.chunks
        cu_queries, cu_keys = chunks.cu_queries, chunks.cu_keys
        longest_query, longest_key = chunks.longest_query, chunks.longest_key
        key_TGD, value_TGD = (x.index_select(0, chunks.keys_V) for x in (key_TGD, value_TGD))
    attend, says_groups = _varlen_attn()
    return attend(
        *(query_TND, key_TGD, value_TGD, cu_queries, cu_keys, longest_query, longest_key),
        # (tokens to the left, tokens to the right); -1 is all of them.
        window_size=(-1 if window is None else window - 1, 0),
        scale=scale,
        **({"enable_gqa": query_TND.size(1) != key_TGD.size(1)} if says_groups else {}),
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
