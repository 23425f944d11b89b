"""Learned positions: the table that a GPTModel adds to its word embeddings.

Legend: B rows, S tokens of a row, padded or packed, P rows of the table, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarlhf.architectures.architecture import Architecture
from megarlhf.layout import column_multiple


class PositionTable(nn.Module):
    """Stands where a GPTModel has `embedding.position_embeddings`, and is called as that is.

    Megatron-Core's own is an `nn.Embedding` in fp32 whatever the model's dtype, and knows no offset. The weight
    [P, H] is on every tensor-parallel rank and gets the same gradient on each.
    """

    def __init__(self, config: TransformerConfig, arch: Architecture) -> None:
        super().__init__()
        self.offset = arch.position_offset
        self.num_positions = arch.max_positions
        self.beyond = column_multiple(config.tensor_model_parallel_size, config.context_parallel_size) - 1
        self.deterministic = config.deterministic_mode
        rows = arch.max_positions + arch.position_offset
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=config.params_dtype))

    def forward(self, positions_BS: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S, H].

        A grid's length is rounded up (`layout.column_multiple`): some columns of padding may lie beyond the table. They
        read its last row, and no token sees them. A packed row may be any length, its positions not.
        """
        if positions_BS.device.type == "cpu":
            count = int(positions_BS.max()) + 1
            assert count <= self.num_positions + self.beyond, f"{count} positions, the table has {self.num_positions}"
        else:  # not asked for here: that would mean waiting for the device
            torch._assert_async(
                (positions_BS < self.num_positions + self.beyond).all(),
                f"a position lies beyond the table, which has {self.num_positions}",
            )
        rows_BS = positions_BS.clamp(max=self.num_positions - 1) + self.offset
        # As Megatron-Core has it for its embedding of words.
        return self.weight[rows_BS] if self.deterministic else nn.functional.embedding(rows_BS, self.weight)
