"""Rotary positions of packed rows.

Legend: T tokens of a packed row, D channels of a head that are turned.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megarlhf.parallel.context import zigzag
from megarlhf.parallel.packing.rows import PackedRow


class PackedRotary(RotaryEmbedding):
    """Megatron-Core's table of angles; for a packed row, cosines and sines at the row's own positions.

    A GPTModel asks `get_rotary_seq_len` and hands the answer to `forward`: the length of the table for padded rows,
    here the row itself for a packed one. Its cosines and sines are made once and go with it to the attention of every
    layer, which turns queries and keys (`models/attention/layers.py`); to Megatron the packed row has no rotary
    positions.
    """

    def __init__(self, *, dtype: torch.dtype, attention_factor: float = 1.0, **named: Any) -> None:
        """attention_factor: by which cosines and sines are multiplied. Of padded rows Megatron-Core's attention makes
        them, and reads it from its configuration (`settings.transformer_config`)."""
        super().__init__(**named)
        self.dtype = dtype
        self.attention_factor = attention_factor
        self.cp = 1 if self.cp_group is None else self.cp_group.size()

    def get_rotary_seq_len(self, *inputs: Any) -> int | PackedRow:
        """The packed row, which a GPTModel gives last; otherwise the number of positions of a padded one."""
        return inputs[-1] if isinstance(inputs[-1], PackedRow) else super().get_rotary_seq_len(*inputs)

    def forward(
        self, row: int | PackedRow, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor | None:
        """How many positions count from 0 -> the angles of this rank's, [S / cp, 1, 1, D], radians. A packed row is
        given its own."""
        if not isinstance(row, PackedRow):
            # Upstream cuts the table over the ranks by an index in pinned memory, which there is with CUDA only.
            angles_S11D: Tensor = super().forward(row, offset, True)
            return angles_S11D if self.cp == 1 else angles_S11D[zigzag([row], self.cp, self.cp_group.rank())]
        assert row.positions_T is not None, "a packed row comes from packed_row()"
        assert self.seq_len_interpolation_factor is None, "packed rows know no interpolated positions"
        frequencies_D = self.inv_freq.to(row.positions_T.device)
        angles_T1D = torch.outer(row.positions_T.to(frequencies_D.dtype), frequencies_D)[:, None]
        cos_T1D, sin_T1D = angles_T1D.cos(), angles_T1D.sin()
        if self.attention_factor != 1.0:
            cos_T1D, sin_T1D = cos_T1D * self.attention_factor, sin_T1D * self.attention_factor
        row.rotary_cos_sin = (cos_T1D.to(self.dtype), sin_T1D.to(self.dtype))
        return None
