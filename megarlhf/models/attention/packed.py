"""Causal attention over a packed row: each sequence by itself, exactly.

16-bit numbers on a GPU go to `torch.nn.attention.varlen_attn`. Everything else goes to torch's attention, one sequence
after the other; neighbours of equal length are computed in one call. With a window, each sequence is computed block by
block, so that the work grows with the length and not with its square. Larger calls are not faster on a CPU
(docs/log.md).

Under context parallelism a rank has the queries of its share of the row and gathers the keys and values of the whole
row. It has two chunks of each sequence, and each chunk attends to the keys up to its own last one. The work is equal on
all ranks, about 1 / cp of the whole.

Rows whose segments continue others go to `attention/tree.py`.

Legend: T tokens of the row, T' this rank's share of them (all without context parallelism), N query heads and G
key-value groups of this rank, D head dimension; B sequences of equal length L, chunks of C tokens.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels.backends import log_once
from megarlhf.models.attention.past import attend_by_runs, attend_to_the_past, attention_path, varlen
from megarlhf.models.attention.tree import tree_attention
from megarlhf.parallel.context import ContextShare, gather_sequence
from megarlhf.parallel.packing.rows import PackedRow
from megarlhf.parallel.packing.trees import Borders

log = logging.getLogger(__name__)


def packed_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """Softmax(Q K^T scale) V of each sequence by itself, over the past or over its last `window` tokens. A prefix that
    several sequences share is in the row once; gradients of its keys and values are sums over these sequences.

    Shapes:  [T', N, D], [T', G, D] twice, N a multiple of G -> [T', N, D]
    Options: `scale` None is 1 / sqrt(D); `window` counts the token itself, None is all of the past
    Checked: forward and backward against fp64, per sequence
    Raises:  ValueError on a GPU where this torch's `varlen_attn` lacks an option that is needed
    """
    sizes = {x.size(0) for x in (query_TND, key_TGD, value_TGD)}
    num_tokens = row.num_local_tokens
    assert sizes == {num_tokens}, f"the row's sequences have {num_tokens} tokens in all, got {sizes}"
    if row.has_trees:
        assert row.share is None, "context parallelism splits whole sequences"
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
    """Gather the keys and values of all ranks in the order of the tokens, with one message each way.
    [T', ..., G, D] twice -> [T, ..., G, D] twice; padded rows have a batch axis after the tokens."""
    both_TGD = gather_sequence(torch.cat([key_TGD, value_TGD], -2), group, share)
    key_TGD, value_TGD = both_TGD.chunk(2, -2)
    return key_TGD, value_TGD


def attention_by_runs(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """`packed_attention` by torch's own attention: one call for each run of neighbours of equal length.

    The runs are views of the row; nothing is padded or gathered.
    """
    attend = partial(attend_to_the_past, window=window, scale=scale)
    return attend_by_runs(attend, [(length, length) for length in row.lengths], query_TND, key_TGD, value_TGD)


def chunks_by_runs(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """`attention_by_runs` for this rank's chunks of each sequence. [T', N, D], [T, G, D] twice -> [T', N, D]"""
    assert row.share is not None
    cp, rank = row.share.group.size(), row.share.group.rank()
    attend = partial(chunks_attention, cp=cp, rank=rank, window=window, scale=scale)
    return attend_by_runs(attend, [(length // cp, length) for length in row.lengths], query_TND, key_TGD, value_TGD)


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
    """Attention of chunks `rank` and 2 cp - 1 - `rank` of the queries (`parallel/context.py`) to all keys and values,
    for sequences of equal length. [B, L / cp, N, D], [B, L, G, D] twice -> [B, L / cp, N, D]"""
    size = key_BLGD.size(1) // (2 * cp)
    chunks = (rank, 2 * cp - 1 - rank)
    parts = []
    for chunk, query_BCND in zip(chunks, query_BLND.split(size, 1), strict=True):
        first = 0 if window is None else max(0, chunk * size - (window - 1))
        key, value = (x[:, first : (chunk + 1) * size] for x in (key_BLGD, value_BLGD))
        parts.append(attend_to_the_past(query_BCND, key, value, window, scale))
    return torch.cat(parts, 1)


def varlen_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """`packed_attention` by one call of `torch.nn.attention.varlen_attn`.

    Under context parallelism each chunk is a sequence of queries with a copy of the keys up to its last one; the kernel
    aligns the last query with the last key. The copy is needed since sequences of keys must be contiguous. It has
    T (1 + 1 / 2 cp) tokens in all.
    """
    if row.share is None:
        borders = Borders(row.cu_seqlens_q, row.cu_seqlens_q, row.max_seqlen_q, row.max_seqlen_q)
    else:
        borders = row.chunks.borders
        key_TGD, value_TGD = (x.index_select(0, row.chunks.keys_V) for x in (key_TGD, value_TGD))
    return varlen(query_TND, key_TGD, value_TGD, borders, scale=scale, window=window)
