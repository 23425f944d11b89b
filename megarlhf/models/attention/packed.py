"""Causal attention over a packed row: each sequence by itself, exactly.

Two ways. `torch.nn.attention.varlen_attn` for 16-bit numbers on a GPU. Everywhere else torch's attention on one
sequence after the other, neighbours of equal length at once, and with a window on one block after the other, so that
the work grows with the length and not with its square. On a CPU more at once is not faster (docs/log.md).

Under context parallelism a rank has the queries of its share of the row, and gathers the keys and values of all of it.
Each of its chunks, two of a sequence, attends to the keys up to its own last one: in all ranks alike, and about 1 / cp
of the work.

Rows whose segments continue others go to `attention/tree.py`.

Legend: T tokens of the row, T' this rank's (all of them without context parallelism), N query heads and G key-value
groups of this rank, D head dimension; B sequences of equal length, L their length, C that of a chunk.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels.backends import log_once
from megarlhf.models.attention.past import attend_to_the_past, attention_path, varlen
from megarlhf.models.attention.tree import tree_attention
from megarlhf.parallel.context import ContextShare, gather_sequence
from megarlhf.parallel.packing.rows import PackedRow
from megarlhf.parallel.packing.trees import Borders

log = logging.getLogger(__name__)


def packed_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """Softmax(Q K^T scale) V of each sequence by itself, over the past or over its last `window` tokens. What several
    sequences of the row begin with stands in it once, and the gradients of its keys and values are sums over them.

    Shapes:  [T', N, D], [T', G, D] twice, N a multiple of G -> [T', N, D]
    Numbers: `scale` None is 1 / sqrt(D); `window` counts the token itself, None is all of the past
    Checked: forward and backward against fp64, per sequence
    Raises:  ValueError on a GPU where this torch's `varlen_attn` cannot do it
    """
    sizes = {x.size(0) for x in (query_TND, key_TGD, value_TGD)}
    here = row.num_local_tokens
    assert sizes == {here}, f"the row's sequences have {here} tokens in all, got {sizes}"
    if row.has_trees:
        assert row.share is None, "context parallelism cuts whole sequences"
        return tree_attention(query_TND, key_TGD, value_TGD, row, scale=scale, window=window)
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
    borders = Borders(cu_queries, cu_keys, longest_query, longest_key)
    return varlen(query_TND, key_TGD, value_TGD, borders, scale=scale, window=window)
