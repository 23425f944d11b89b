"""How Megatron and vLLM put an entry's tensors into one storage; shared by the architectures' tables."""

from __future__ import annotations

from collections.abc import Sequence

from megarlhf.architectures.shards import (
    LogicalTensor,
    Shard,
    column_parallel,
    cut_rows,
    divide,
    fused_rows,
    row_parallel,
    rows,
    stacked,
    transposed_storage,
    transposed_tensors,
)
from megarlhf.architectures.table import Rule, TPRank


def whole(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    """Replicated on every tensor-parallel rank."""
    (tensor,) = tensors
    return rows(tensor, 0, tensor.shape[0])


def split_rows(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    """Each tensor's rows split over the ranks; several are stacked: a gated MLP's [gate_r; up_r]."""
    return fused_rows(*(column_parallel(tensor, rank.tp, rank.tp_rank) for tensor in tensors))


def split_halves(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    """A gated MLP's [gate_r; up_r], as `split_rows`, where gate and up are the halves of one tensor."""
    (tensor,) = tensors
    half = divide(tensor.shape[0], 2, f"rows of {tensor.name}")
    share = divide(half, rank.tp, f"rows of each half of {tensor.name}")
    at = rank.tp_rank * share
    return fused_rows(*(rows(tensor, start + at, start + at + share) for start in (0, half)))


def split_columns(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    (tensor,) = tensors
    return row_parallel(tensor, rank.tp, rank.tp_rank)


def split_vocab(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    """Rows of the padded vocabulary split over the ranks; the last ranks hold the padding."""
    (tensor,) = tensors
    return column_parallel(tensor, rank.tp, rank.tp_rank, padded_rows=rank.padded_vocab)


def transposed(rule: Rule) -> Rule:
    """The rule for matrices that Hugging Face stores as [input, output] (GPT-2's Conv1D)."""

    def of_transposes(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
        return transposed_tensors(rule([LogicalTensor(t.name, t.shape[::-1]) for t in tensors], rank))

    return of_transposes


def qkv_by_group(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    """Megatron: per KV group [its query heads; k; v], split over the ranks in equal shares of rows.

    A share is whole groups as long as tp divides their number; above that it cuts inside groups, wherever that
    falls (Megatron-Core gathers the activations again).
    """
    q, k, v = _query_key_value(tensors, rank)
    arch, tp = rank.arch, rank.tp
    groups = arch.num_kv_heads
    if groups % tp and (tp % groups or arch.num_heads % tp):
        raise ValueError(
            f"tp = {tp} fits neither the {groups} KV heads of the model nor its {arch.num_heads} heads; choose a "
            f"tp that divides {groups}, or a multiple of {groups} that divides {arch.num_heads}"
        )
    width = arch.head_dim
    queries = arch.num_heads // groups * width
    share = divide(groups * (queries + 2 * width), tp, "rows of the fused QKV")
    start, stop = rank.tp_rank * share, (rank.tp_rank + 1) * share
    size = queries + 2 * width
    first, last = start // size, -(-stop // size)
    parts = []
    for group in range(first, last):
        parts.append(_part(q, group, queries))
        parts += [_part(k, group, width), _part(v, group, width)]
    return cut_rows(fused_rows(*parts), start - first * size, stop - first * size)


def qkv_by_kind(tensors: Sequence[LogicalTensor], rank: TPRank) -> Shard:
    """vLLM: [query heads of the rank; its k; its v]; with tp > KV heads, tp / KV heads ranks hold each."""
    q, k, v = _query_key_value(tensors, rank)
    num_kv_heads, width = rank.arch.num_kv_heads, rank.arch.head_dim
    heads = divide(rank.arch.num_heads, rank.tp, "query heads")
    if rank.tp <= num_kv_heads:
        per_rank = divide(num_kv_heads, rank.tp, "KV heads")
        index = rank.tp_rank
    else:
        if rank.tp % num_kv_heads:
            raise ValueError(
                f"tp = {rank.tp} is not a multiple of the {num_kv_heads} KV heads, nor the other way round; "
                "choose a tp that is"
            )
        per_rank, index = 1, rank.tp_rank // (rank.tp // num_kv_heads)
    return fused_rows(
        _part(q, rank.tp_rank, heads * width), _part(k, index, per_rank * width), _part(v, index, per_rank * width)
    )


def stack_as_rows(shards: Sequence[Shard]) -> Shard:
    """[experts, input, output], each expert transposed, declared as [experts x input, output] (weight2)."""
    num_rows, num_columns = shards[0].shape
    return stacked([transposed_storage(x) for x in shards], (len(shards) * num_columns, num_rows))


def stack_as_columns(shards: Sequence[Shard]) -> Shard:
    """[experts, input, output], each expert transposed, declared as [input, experts x output] (weight1).

    The declared shape is not how the memory is read: Megatron-Core's GroupedMLP views it by expert first.
    """
    num_rows, num_columns = shards[0].shape
    return stacked([transposed_storage(x) for x in shards], (num_columns, len(shards) * num_rows))


_Part = tuple[LogicalTensor, int]
"""A tensor and the row at which the part begins."""


def _query_key_value(tensors: Sequence[LogicalTensor], rank: TPRank) -> tuple[_Part, _Part, _Part]:
    """Three tensors, or one in which they are stacked."""
    if len(tensors) == 1:
        queries = rank.arch.num_heads * rank.arch.head_dim
        keys = rank.arch.num_kv_heads * rank.arch.head_dim
        return (tensors[0], 0), (tensors[0], queries), (tensors[0], queries + keys)
    q, k, v = tensors
    return (q, 0), (k, 0), (v, 0)


def _part(part: _Part, index: int, size: int) -> Shard:
    """The `index`-th run of `size` rows of the part."""
    tensor, base = part
    return rows(tensor, base + index * size, base + (index + 1) * size)
