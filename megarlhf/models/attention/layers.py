"""Attention for Megatron-Core's layers: the core for the local layer spec, packed rows for TransformerEngine's, and
key-value groups split by tensor parallelism.

Rows are either padded on the right, so that a causal mask already keeps padding out of every real position, or packed
(`parallel/packing/rows.py`).

Legend: S sequence, B batch, T tokens of a packed row, S' and T' this rank's share of them under context parallelism
(otherwise all), N query heads and G key-value groups of this rank, D head dimension.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.models.attention.packed import chunks_attention, gather_keys, packed_attention
from megarlhf.models.elementwise import rotate
from megarlhf.parallel.packing.rows import PackedRow


class CausalAttention(nn.Module):
    """Softmax(Q K^T / sqrt(D)) V over the past, or over its last `window` tokens.

    No [S, S] matrix is stored where torch has a kernel. A window shorter than the row needs a mask.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = context_group(config, pg_collection)
        self.window = window_of(config)

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]; for a packed row S' = T' and B = 1."""
        assert (attention_mask, attention_bias) == (None, None), "causal attention only"
        if packed_seq_params is not None:
            row, query, key, value = open_packed_row(packed_seq_params, query_SBND, key_SBGD, value_SBGD)
            context_TND = packed_attention(query, key, value, row, scale=self.softmax_scale, window=self.window)
            return context_TND.flatten(1).unsqueeze(1)
        if self.cp_group is not None:
            options: dict[str, Any] = {"scale": self.softmax_scale, "window": self.window}
            return share_of_padded_rows(query_SBND, key_SBGD, value_SBGD, self.cp_group, **options)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGD))
        length = query.size(2)
        band_SS = None
        if self.window is not None and length > self.window:
            band_SS = causal_band(length, self.window, query.device)
        context_BNSD = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=band_SS,
            is_causal=band_SS is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context_BNSD.permute(2, 0, 1, 3).flatten(2).contiguous()


def context_group(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> dist.ProcessGroup | None:
    """The context-parallel group; None without context parallelism."""
    if config.context_parallel_size == 1:
        return None
    assert pg_collection is not None, "context parallelism needs the groups of the mesh"
    return pg_collection.cp


def window_of(config: TransformerConfig) -> int | None:
    """Tokens that a token attends to, itself included; None: all. Megatron's pair (tokens to the left, tokens to the
    right) leaves the token itself out."""
    return None if config.window_size is None else config.window_size[0] + 1


def share_of_padded_rows(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    cp_group: dist.ProcessGroup,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention for this rank's chunks of padded rows: [S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]."""
    key_SBGD, value_SBGD = gather_keys(key_SBGD, value_SBGD, cp_group)
    inputs = (x.transpose(0, 1) for x in (query_SBND, key_SBGD, value_SBGD))
    cp, rank = cp_group.size(), cp_group.rank()
    context_BSND = chunks_attention(*inputs, cp=cp, rank=rank, scale=scale, window=window)
    return context_BSND.transpose(0, 1).flatten(2).contiguous()


def open_packed_row(row: PackedSeqParams, *inputs_T1ND: Tensor) -> tuple[PackedRow, Tensor, Tensor, Tensor]:
    """The row, and its query, key and value without the batch axis: [T', 1, heads, D] -> [T', heads, D]. Rotary
    positions are applied to query and key."""
    assert isinstance(row, PackedRow), f"packed rows must be PackedRow, got {type(row).__name__}"
    rows = inputs_T1ND[0].size(1)
    assert rows == 1, f"a batch holds one packed row, got {rows} rows"
    query_TND, key_TGD, value_TGD = (x.squeeze(1) for x in inputs_T1ND)
    if row.rotary_cos_sin is not None:
        query_TND, key_TGD = rotate(query_TND, *row.rotary_cos_sin), rotate(key_TGD, *row.rotary_cos_sin)
    return row, query_TND, key_TGD, value_TGD


def causal_band(length: int, window: int, device: torch.device) -> Tensor:
    """[S, S] bool: True where a token (row) attends to another (column): to itself and the `window` - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


class PackedRowAttention:
    """Mixin that stands before TransformerEngine's attention in the order of bases and adds packed rows.

    Packed rows are handed on in the format `thd`, in which query and output have no batch axis. Upstream turns the
    causal mask into the padding-causal mask that TransformerEngine demands for it. Padded rows pass unchanged.

    Our own attention is used where TransformerEngine cannot compute the result:

    - numbers wider than 16 bits in packed rows: its `thd` kernels take 16 bits only
    - a window under context parallelism: its ring of ranks has none. Rows without a window do use that ring; they are
      sharded as it expects, and `thd` states whole sequences.
    - rows whose segments continue others: partial results of `thd` cannot be merged
    """

    def __init__(self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **named: Any) -> None:
        super().__init__(config, *args, softmax_scale=softmax_scale, **named)  # type: ignore[call-arg]
        self.own_scale = softmax_scale
        self.own_window = window_of(config)
        self.own_group = context_group(config, named.get("pg_collection"))
        self.own_way = self.own_group is not None and self.own_window is not None

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **named: Any,
    ) -> Tensor:
        """[S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]; for a packed row S' = T' and B = 1."""
        core_options = {"attn_mask_type": attn_mask_type, "attention_bias": attention_bias, **named}
        core = super().forward  # type: ignore[misc]
        if packed_seq_params is None and self.own_way:
            assert self.own_group is not None
            options: dict[str, Any] = {"scale": self.own_scale, "window": self.own_window}
            return share_of_padded_rows(query_SBND, key_SBGD, value_SBGD, self.own_group, **options)
        if packed_seq_params is None:
            return core(query_SBND, key_SBGD, value_SBGD, attention_mask, **core_options)
        assert attention_mask is None, "causal attention only"
        row, query, key, value = open_packed_row(packed_seq_params, query_SBND, key_SBGD, value_SBGD)
        if query.dtype in (torch.float16, torch.bfloat16) and not self.own_way and not row.has_trees:
            context_TX: Tensor = core(query, key, value, None, packed_seq_params=row.thd(), **core_options)
        else:
            context_TX = packed_attention(query, key, value, row, scale=self.own_scale, window=self.own_window)
        return context_TX.reshape(row.num_local_tokens, 1, -1)


def with_packed_rows(core: type) -> type:
    """Subclass of TransformerEngine's attention `core` that also takes packed rows."""
    return type(f"Packed{core.__name__}", (PackedRowAttention, core), {})


class GroupedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention on our process groups, also with more tensor-parallel ranks than key-value groups.

    Upstream gathers split key-value groups over `parallel_state`'s process group, which does not exist here. It also
    has one switch for the biases of attention and MLP; here `output_bias` is the switch for the output projection.
    """

    def __init__(self, config: TransformerConfig, *args: Any, output_bias: bool, **named: Any) -> None:
        own = copy.copy(config)
        own.add_bias_linear = output_bias
        super().__init__(own, *args, **named)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """[S, B, H] -> query [S, B, N, D], key and value [S, B, G, D].

        The fused weight holds group after group as rows [its queries; key; value], split evenly over the ranks, also
        inside groups. Each rank assembles its group and takes its share of the group's query heads.
        """
        groups = self.config.num_query_groups
        if groups >= self.world_size:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        assert (split_qkv, output_gate) == (True, False), "no fused or gated queries with split groups"
        ranks_per_group = self.world_size // groups
        group, rank_in_group = divmod(self.tp_group.rank(), ranks_per_group)
        local, _ = self.linear_qkv(hidden_states)
        fused = all_gather_last_dim_from_tensor_parallel_region(local, group=self.tp_group)
        group_SBXD = fused.chunk(groups, -1)[group].unflatten(-1, (-1, self.hidden_size_per_attention_head))
        heads = (group_SBXD.size(2) - 2) // ranks_per_group
        query_SBND = group_SBXD[:, :, rank_in_group * heads : (rank_in_group + 1) * heads]
        key_SBGD, value_SBGD = group_SBXD[:, :, -2:-1], group_SBXD[:, :, -1:]
        if self.q_layernorm is not None:
            query_SBND = self.q_layernorm(query_SBND)
        if self.k_layernorm is not None:
            key_SBGD = self.k_layernorm(key_SBGD)
        return query_SBND, key_SBGD, value_SBGD
