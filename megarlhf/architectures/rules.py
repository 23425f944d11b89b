"""How Megatron and vLLM put an entry's tensors into one storage; shared by the architectures' tables."""

from __future__ import annotations

from collections.abc import Sequence

from megarlhf.architectures.shards import (
    Layout,
    Logical,
    column_parallel,
    cut_rows,
    divide,
    fused_rows,
    replicated,
    row_parallel,
    rows,
    stacked,
    transposed_storage,
    transposed_tensors,
)
from megarlhf.architectures.table import Rule, Slot


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


def transposed(rule: Rule) -> Rule:
    """The rule for matrices that Hugging Face stores as [input, output] (GPT-2's Conv1D)."""

    def of_transposes(tensors: Sequence[Logical], slot: Slot) -> Layout:
        return transposed_tensors(rule([Logical(t.name, t.shape[::-1]) for t in tensors], slot))

    return of_transposes


def qkv_by_group(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """Megatron: per KV group [its query heads; k; v], split over the ranks in equal shares of rows.

    A share is whole groups as long as tp divides their number; above that it cuts inside groups, wherever that
    falls (Megatron-Core gathers the activations again).
    """
    q, k, v = _query_key_value(tensors, slot)
    arch, tp = slot.arch, slot.tp
    groups = arch.num_kv_heads
    if groups % tp and (tp % groups or arch.num_heads % tp):
        raise ValueError(
            f"tp = {tp} fits neither the {groups} KV heads of the model nor its {arch.num_heads} heads; choose a "
            f"tp that divides {groups}, or a multiple of {groups} that divides {arch.num_heads}"
        )
    width = arch.head_dim
    queries = arch.num_heads // groups * width
    share = divide(groups * (queries + 2 * width), tp, "rows of the fused QKV")
    start, stop = slot.tp_rank * share, (slot.tp_rank + 1) * share
    size = queries + 2 * width
    first, last = start // size, -(-stop // size)
    parts = []
    for group in range(first, last):
        parts.append(_part(q, group, queries))
        parts += [_part(k, group, width), _part(v, group, width)]
    return cut_rows(fused_rows(*parts), start - first * size, stop - first * size)


def qkv_by_kind(tensors: Sequence[Logical], slot: Slot) -> Layout:
    """vLLM: [query heads of the rank; its k; its v]; with tp > KV heads, tp / KV heads ranks hold each."""
    q, k, v = _query_key_value(tensors, slot)
    num_kv_heads, width = slot.arch.num_kv_heads, slot.arch.head_dim
    heads = divide(slot.arch.num_heads, slot.tp, "query heads")
    if slot.tp <= num_kv_heads:
        per_rank = divide(num_kv_heads, slot.tp, "KV heads")
        index = slot.tp_rank
    else:
        if slot.tp % num_kv_heads:
            raise ValueError(
                f"tp = {slot.tp} is not a multiple of the {num_kv_heads} KV heads, nor the other way round; "
                "choose a tp that is"
            )
        per_rank, index = 1, slot.tp_rank // (slot.tp // num_kv_heads)
    return fused_rows(
        _part(q, slot.tp_rank, heads * width), _part(k, index, per_rank * width), _part(v, index, per_rank * width)
    )


def stack_experts(layouts: Sequence[Layout]) -> Layout:
    """[experts, ...]: every expert of the rank in one storage."""
    return stacked(layouts)


def stack_as_rows(layouts: Sequence[Layout]) -> Layout:
    """[experts, input, output], each expert transposed, declared as [experts x input, output] (weight2)."""
    num_rows, num_columns = layouts[0].shape
    return stacked([transposed_storage(x) for x in layouts], (len(layouts) * num_columns, num_rows))


def stack_as_columns(layouts: Sequence[Layout]) -> Layout:
    """[experts, input, output], each expert transposed, declared as [input, experts x output] (weight1).

    The declared shape is not how the memory is read: Megatron-Core's GroupedMLP views it by expert first.
    """
    num_rows, num_columns = layouts[0].shape
    return stacked([transposed_storage(x) for x in layouts], (num_columns, len(layouts) * num_rows))


_Part = tuple[Logical, int]
"""A tensor and the row at which the part begins."""


def _query_key_value(tensors: Sequence[Logical], slot: Slot) -> tuple[_Part, _Part, _Part]:
    """Three tensors, or one in which they stand below each other."""
    if len(tensors) == 1:
        queries = slot.arch.num_heads * slot.arch.head_dim
        keys = slot.arch.num_kv_heads * slot.arch.head_dim
        return (tensors[0], 0), (tensors[0], queries), (tensors[0], queries + keys)
    q, k, v = tensors
    return (q, 0), (k, 0), (v, 0)


def _part(part: _Part, index: int, size: int) -> Layout:
    """The `index`-th run of `size` rows of the part."""
    tensor, base = part
    return rows(tensor, base + index * size, base + (index + 1) * size)
