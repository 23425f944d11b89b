"""Rotary positions, also for packed rows.

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
    """Megatron-Core's table of angles for padded rows; cosines and sines at their own positions for packed rows.

    A GPTModel passes the result of `get_rotary_seq_len` to `forward`: the table's length for padded rows, the row
    itself for a packed one. The cosines and sines of a packed row are computed once and stored on the row, and the
    attention of every layer turns queries and keys by them (`models/attention/layers.py`). To Megatron a packed row has
    no rotary positions.
    """

    def __init__(self, *, dtype: torch.dtype, attention_factor: float = 1.0, **named: Any) -> None:
        """attention_factor: multiplies the cosines and sines of packed rows. For padded rows Megatron-Core's attention
        multiplies by its own setting (`settings.transformer_config`)."""
        super().__init__(**named)
        self.dtype = dtype
        self.attention_factor = attention_factor
        self.cp = 1 if self.cp_group is None else self.cp_group.size()

    def get_rotary_seq_len(self, *inputs: Any) -> int | PackedRow:
        """The packed row, which a GPTModel passes as the last argument, or the number of positions of padded rows."""
        return inputs[-1] if isinstance(inputs[-1], PackedRow) else super().get_rotary_seq_len(*inputs)

    def forward(
        self, row: int | PackedRow, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor | None:
        """Number of positions -> angles of this rank's positions, [S / cp, 1, 1, D], radians. A packed row instead gets
        its `rotary_cos_sin` set, and None is returned."""
        if not isinstance(row, PackedRow):
            # Upstream splits the table over the ranks by an index in pinned memory, which needs CUDA.
            angles_S11D: Tensor = super().forward(row, offset, True)
            return angles_S11D if self.cp == 1 else angles_S11D[zigzag([row], self.cp, self.cp_group.rank())]
        assert row.positions_T is not None, "a packed row comes from packed_row()"
        assert self.seq_len_interpolation_factor is None, "packed rows do not support interpolated positions"
        frequencies_D = self.inv_freq.to(row.positions_T.device)
        angles_T1D = torch.outer(row.positions_T.to(frequencies_D.dtype), frequencies_D)[:, None]
        cos_T1D, sin_T1D = angles_T1D.cos(), angles_T1D.sin()
        if self.attention_factor != 1.0:
            cos_T1D, sin_T1D = cos_T1D * self.attention_factor, sin_T1D * self.attention_factor
        row.rotary_cos_sin = (cos_T1D.to(self.dtype), sin_T1D.to(self.dtype))
        return None
