"""Learned positions: a table of vectors that a GPTModel adds to its word embeddings.

Legend: B rows, S tokens of a row, padded or packed, P rows of the table, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarlhf.architectures.architecture import Architecture
from megarlhf.layout import column_multiple


class PositionTable(nn.Module):
    """Replacement for a GPTModel's `embedding.position_embeddings`.

    Megatron-Core's own is an `nn.Embedding` in fp32, whatever the model's dtype, and has no offset. The weight [P, H]
    is on every tensor-parallel rank and gets the same gradient on each.
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

        A grid's length is rounded up (`layout.column_multiple`), so some padding columns may have positions past the
        end of the table. They read its last row, and no token sees them.
        """
        if positions_BS.device.type == "cpu":
            count = int(positions_BS.max()) + 1
            assert count <= self.num_positions + self.beyond, f"{count} positions, the table has {self.num_positions}"
        else:  # reading the maximum would wait for the device
            torch._assert_async(
                (positions_BS < self.num_positions + self.beyond).all(),
                f"a position is beyond the table, which has {self.num_positions}",
            )
        rows_BS = positions_BS.clamp(max=self.num_positions - 1) + self.offset
        # The same choice as in Megatron-Core's word embedding.
        return self.weight[rows_BS] if self.deterministic else nn.functional.embedding(rows_BS, self.weight)
