"""Causal attention over a packed row: each sequence by itself, exactly.

Two ways. `torch.nn.attention.varlen_attn` where its kernel runs: 16-bit numbers on a GPU since Ampere. Everywhere else
`scaled_dot_product_attention` over sequences of equal length at once.

Legend: T tokens of the row, N query heads and G key-value groups of this rank, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.parallel.packed_rows import PackedRow


def packed_attention(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, row: PackedRow, *, scale: float | None, window: int | None
) -> Tensor:
    """Softmax(Q K^T scale) V of each sequence by itself, over the past or over its last `window` tokens.

    Shapes:  [T, N, D], [T, G, D] twice, N a multiple of G -> [T, N, D]
    Numbers: `scale` None is 1 / sqrt(D); `window` counts the token itself, None is all of the past
    Checked: forward and backward against fp64, per sequence
    """
    num_tokens = query_TND.size(0)
    assert num_tokens == key_TGD.size(0) == value_TGD.size(0) == row.num_tokens, (
        f"the row's {row.num_tokens} tokens are all there is, got {num_tokens}"
    )
    parts = []
    for query, key, value in zip(
        query_TND.split(row.lengths), key_TGD.split(row.lengths), value_TGD.split(row.lengths), strict=True
    ):
        length = query.size(0)
        band = None
        if window is not None and length > window:
            band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        context = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=band,
            is_causal=band is None,
            scale=scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        parts.append(context[0].transpose(0, 1))
    return torch.cat(parts)
