"""Core attention for the local layer spec: torch's scaled-dot-product attention, causal, grouped-query.

Sequences are padded on the right, so a causal mask already keeps padding out of every real position.

Legend: S sequence, B batch, N query heads and G key-value groups of this rank, D head dimension.
"""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(nn.Module):
    """Softmax(Q K^T / sqrt(D)) V over the past, without a stored [S, S] matrix where torch has a kernel for it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError("CausalAttention has no context parallelism; set cp to 1 or use the TE spec")
        self.softmax_scale = softmax_scale

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
        """[S, B, N, D], [S, B, G, D] twice -> [S, B, N x D]."""
        assert (attention_mask, attention_bias, packed_seq_params) == (None, None, None), "causal, padded rows only"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGD))
        context_BNSD = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context_BNSD.permute(2, 0, 1, 3).flatten(2).contiguous()
