"""Sequences end to end in one row: what a model needs to keep them apart.

Legend: T tokens of the row, N sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

QKV_FORMAT = "packed"
"""Not Megatron's `thd`, for which its attention drops the batch axis and applies rotary positions sequence by
sequence, waiting for the device in every layer. Ours keeps [T, 1, ...], and our attention turns each token by its own
position."""


@dataclass
class PackedRow(PackedSeqParams):
    """Where the sequences in a row of T tokens begin and end. Made by `packed_row`, for one forward of one model.

    It travels through Megatron's layers as their `packed_seq_params`.
    """

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, none of them 0: on the host, so that shapes need no wait for the device."""
    positions_T: Tensor | None = None
    """int64: each token's position in its own sequence."""
    rotary_cos_sin: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, 1, D / 2] of a model with rotary positions, which adds them."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def thd(self) -> PackedSeqParams:
        """The same in the format in which TransformerEngine's attention takes them."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_kv=self.cu_seqlens_kv,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
        )


def packed_row(lengths: Sequence[int], device: torch.device) -> PackedRow:
    """A row of sequences of these lengths, which together are the whole row."""
    assert min(lengths, default=0) > 0, f"a packed row holds sequences of one token or more, got lengths {lengths}"
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    lengths_N = torch.tensor(lengths)
    starts_T = cu_seqlens[:-1].long().repeat_interleave(lengths_N)
    positions_T = torch.arange(int(cu_seqlens[-1])) - starts_T
    cu_seqlens = cu_seqlens.to(device)
    shared: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    shared |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return PackedRow(qkv_format=QKV_FORMAT, lengths=tuple(lengths), positions_T=positions_T.to(device), **shared)
