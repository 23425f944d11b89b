"""Rotary positions of packed rows.

Legend: T tokens of a packed row, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megarlhf.parallel.packed_rows import PackedRow


class PackedRotary(RotaryEmbedding):
    """Megatron-Core's table of angles; for a packed row, its lines at the row's own positions.

    A GPTModel asks `get_rotary_seq_len` and hands the answer to `forward`: the length of the table for padded rows,
    here the positions themselves for a packed one. Both sorts of row come by their angles through the same
    operations, so equal positions have equal bits.
    """

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> int | Tensor:
        """Positions [T] of a packed row; otherwise the number of positions of a padded one."""
        if isinstance(packed_seq_params, PackedRow):
            assert packed_seq_params.positions_T is not None, "a packed row comes from packed_row()"
            return packed_seq_params.positions_T
        found: int = super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **named
        )
        return found

    def forward(
        self, positions: int | Tensor, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor:
        """Positions [T], or how many count from 0 -> angles [T, 1, 1, D], radians."""
        if isinstance(positions, Tensor):
            # Not through upstream's forward: it is cached by its arguments, and would keep every row's positions.
            angles: Tensor = self.get_emb(positions, offset)
        else:
            angles = super().forward(positions, offset, packed_seq, cp_group)
        return angles

    def get_freqs_non_repeated(self, positions: int | Tensor, offset: int = 0) -> Tensor:
        """Positions [T], or how many count from 0 -> [T, D / 2], which `get_emb` repeats."""
        if not isinstance(positions, Tensor):
            angles: Tensor = super().get_freqs_non_repeated(positions, offset)
            return angles
        assert self.seq_len_interpolation_factor is None, "packed rows know no interpolated positions"
        return torch.outer(positions.to(self.inv_freq.dtype) + offset, self.inv_freq)
