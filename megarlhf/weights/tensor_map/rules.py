"""How Megatron and vLLM put an entry's tensors into one storage; shared by the architectures' tables."""

from __future__ import annotations

from collections.abc import Sequence

from megarlhf.weights.tensor_map.layouts import (
    Layout,
    Logical,
    column_parallel,
    divide,
    fused_rows,
    replicated,
    row_parallel,
    rows,
)
from megarlhf.weights.tensor_map.table import Slot


def whole(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """Replicated on every tensor-parallel rank."""
    (tensor,) = tensors
    return replicated(tensor)


def split_rows(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """Each tensor's rows split over the ranks; several are stacked: a gated MLP's [gate_r; up_r]."""
    return fused_rows(*(column_parallel(tensor, slot.tp, slot.tp_rank) for tensor in tensors))


def split_columns(tensors: Sequence[Logical], slot: Slot) -> Layout:
    (tensor,) = tensors
    return row_parallel(tensor, slot.tp, slot.tp_rank)


def split_vocab(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """Rows of the padded vocabulary split over the ranks; the last ranks hold the padding."""
    (tensor,) = tensors
    return column_parallel(tensor, slot.tp, slot.tp_rank, padded_rows=slot.padded_vocab)


def qkv_by_group(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """Megatron: per KV group [its query heads; k; v], groups split contiguously over the ranks."""
    q, k, v = tensors
    arch = slot.arch
    if arch.num_kv_heads % slot.tp:
        raise ValueError(
            f"tp = {slot.tp} does not divide the {arch.num_kv_heads} KV heads of the model; Megatron's fused "
            f"QKV is split by KV head (replicated KV heads come later): "
            f"choose a tp that divides {arch.num_kv_heads}"
        )
    width = arch.head_dim
    queries = arch.num_heads // arch.num_kv_heads * width
    per_rank = arch.num_kv_heads // slot.tp
    parts = []
    for group in range(slot.tp_rank * per_rank, (slot.tp_rank + 1) * per_rank):
        parts.append(rows(q, group * queries, (group + 1) * queries))
        parts += [rows(tensor, group * width, (group + 1) * width) for tensor in (k, v)]
    return fused_rows(*parts)


def qkv_by_kind(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """vLLM: [query heads of the rank; its k; its v]; with tp > KV heads, tp / KV heads ranks hold each."""
    q, k, v = tensors
    num_kv_heads, width = slot.arch.num_kv_heads, slot.arch.head_dim
    divide(slot.arch.num_heads, slot.tp, "query heads")
    if slot.tp <= num_kv_heads:
        per_rank = divide(num_kv_heads, slot.tp, "KV heads")
        first = slot.tp_rank * per_rank
    else:
        if slot.tp % num_kv_heads:
            raise ValueError(
                f"tp = {slot.tp} is not a multiple of the {num_kv_heads} KV heads, nor the other way round; "
                "choose a tp that is"
            )
        per_rank, first = 1, slot.tp_rank // (slot.tp // num_kv_heads)
    return fused_rows(
        column_parallel(q, slot.tp, slot.tp_rank),
        *(rows(tensor, first * width, (first + per_rank) * width) for tensor in (k, v)),
    )
