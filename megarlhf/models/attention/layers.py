"""Attention for Megatron-Core's layers: the core for the local layer spec, and query groups cut by tensor parallelism.

Rows are either padded on the right, so that a causal mask already keeps padding out of every real position, or
packed (`parallel/packing/rows.py`).

Legend: S sequence, B batch, T tokens of a packed row, S' and T' those of them that are this rank's (all but under
context parallelism), N query heads and G key-value groups of this rank, D head dimension.
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

    Without a stored [S, S] matrix where torch has a kernel for it; a window that bites needs the mask.
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
        # Megatron's pair (tokens to the left, tokens to the right); ours counts the token itself.
        self.window = None if config.window_size is None else config.window_size[0] + 1

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
        """[S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]; of a packed row S' = T' and B = 1."""
        assert (attention_mask, attention_bias) == (None, None), "causal attention only"
        if packed_seq_params is not None:
            row, query, key, value = open_packed_row(packed_seq_params, query_SBND, key_SBGD, value_SBGD)
            context_TND = packed_attention(query, key, value, row, scale=self.softmax_scale, window=self.window)
            return context_TND.flatten(1).unsqueeze(1)
        if self.cp_group is not None:
            how: dict[str, Any] = {"scale": self.softmax_scale, "window": self.window}
            return share_of_padded_rows(query_SBND, key_SBGD, value_SBGD, self.cp_group, **how)
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
    """Over which sequences are cut; None without context parallelism."""
    if config.context_parallel_size == 1:
        return None
    assert pg_collection is not None, "context parallelism needs the groups of the mesh"
    return pg_collection.cp


def share_of_padded_rows(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    cp_group: dist.ProcessGroup,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """This rank's chunks of padded rows: [S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]."""
    key_SBGD, value_SBGD = gather_keys(key_SBGD, value_SBGD, cp_group)
    query, key, value = (x.transpose(0, 1) for x in (query_SBND, key_SBGD, value_SBGD))
    context_BSND = chunks_attention(
        *(query, key, value), cp=cp_group.size(), rank=cp_group.rank(), scale=scale, window=window
    )
    return context_BSND.transpose(0, 1).flatten(2).contiguous()


def open_packed_row(row: PackedSeqParams, *inputs_T1ND: Tensor) -> tuple[PackedRow, Tensor, Tensor, Tensor]:
    """The row and its query, key and value, [T', 1, heads, D] -> [T', heads, D], query and key turned by position."""
    assert isinstance(row, PackedRow), f"packed rows come as PackedRow, got {type(row).__name__}"
    rows = inputs_T1ND[0].size(1)
    assert rows == 1, f"a packed row stands alone in its batch, got {rows} rows"
    query_TND, key_TGD, value_TGD = (x.squeeze(1) for x in inputs_T1ND)
    if row.rotary_cos_sin is not None:
        query_TND, key_TGD = rotate(query_TND, *row.rotary_cos_sin), rotate(key_TGD, *row.rotary_cos_sin)
    return row, query_TND, key_TGD, value_TGD


def causal_band(length: int, window: int, device: torch.device) -> Tensor:
    """[S, S] bool: True where a token (row) attends to another (column), itself and `window` - 1 before it."""
    ahead_SS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return ahead_SS.triu(1 - window)


class PackedRowAttention:
    """Before an attention of TransformerEngine's kind in the order of bases: packed rows in the format it knows.

    That is `thd`, in which query and output have no batch axis. Upstream turns the causal mask into the
    padding-causal one that TransformerEngine asks for with it. Padded rows go on unchanged.

    TransformerEngine's kernels for `thd` take 16 bits: packed rows of wider numbers go our own way. So do, under
    context parallelism, rows with a window: its ring of ranks has none. Its other rows go round that ring; they are cut
    over the ranks as it wants them, and `thd` states whole sequences. Rows whose segments continue others go our own
    way in any case: what `thd` gives cannot be merged.
    """

    def __init__(self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **named: Any) -> None:
        super().__init__(config, *args, softmax_scale=softmax_scale, **named)  # type: ignore[call-arg]
        self.own_scale = softmax_scale
        self.own_window = None if config.window_size is None else config.window_size[0] + 1
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
        """[S', B, N, D], [S', B, G, D] twice -> [S', B, N x D]; of a packed row S' = T' and B = 1."""
        core_options = {"attn_mask_type": attn_mask_type, "attention_bias": attention_bias, **named}
        core = super().forward  # type: ignore[misc]
        if packed_seq_params is None and self.own_way:
            assert self.own_group is not None
            how: dict[str, Any] = {"scale": self.own_scale, "window": self.own_window}
            return share_of_padded_rows(query_SBND, key_SBGD, value_SBGD, self.own_group, **how)
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
    """An attention of TransformerEngine's kind that takes packed rows too."""
    return type(f"Packed{core.__name__}", (PackedRowAttention, core), {})


class GroupedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention; its case of more tensor-parallel ranks than key-value groups, on our groups.

    Upstream gathers the cut groups over `parallel_state`'s group and rank, which do not exist here. It also has one
    switch for the biases of attention and MLP; `output_bias` says here whether the output projection has one.
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

        Rows of the fused weight lie group by group as [its queries; key; value] and are cut evenly over the ranks,
        inside groups. Each rank assembles its group and takes its share of the group's query heads.
        """
        groups = self.config.num_query_groups
        if groups >= self.world_size:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        assert (split_qkv, output_gate) == (True, False), "no fused or gated queries with cut groups"
        ranks_per_group = self.world_size // groups
        group, share = divmod(self.tp_group.rank(), ranks_per_group)
        cut, _ = self.linear_qkv(hidden_states)
        fused = all_gather_last_dim_from_tensor_parallel_region(cut, group=self.tp_group)
        mine_SBXD = fused.chunk(groups, -1)[group].unflatten(-1, (-1, self.hidden_size_per_attention_head))
        heads = (mine_SBXD.size(2) - 2) // ranks_per_group
        query_SBND = mine_SBXD[:, :, share * heads : (share + 1) * heads]
        key_SBGD, value_SBGD = mine_SBXD[:, :, -2:-1], mine_SBXD[:, :, -1:]
        if self.q_layernorm is not None:
            query_SBND = self.q_layernorm(query_SBND)
        if self.k_layernorm is not None:
            key_SBGD = self.k_layernorm(key_SBGD)
        return query_SBND, key_SBGD, value_SBGD
