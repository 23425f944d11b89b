"""Packed rows: sequences end to end in one row, which may share prefixes.

A row consists of segments. A segment may continue another one: it then sees its own past, all of that segment, and
everything that that segment continues. So segments form trees, and a sequence is the path from a root to a segment.
Without continuations each segment is a sequence.

Legend: T tokens of the row, or this rank's T / cp of them under context parallelism; N segments, M chunks, V keys of
all chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarlhf.parallel.context import ContextShare, context_share, ranges
from megarlhf.parallel.packing.trees import Borders, Trees, block_borders, plan_trees

QKV_FORMAT = "packed"
"""Name of our format. Megatron's `thd` is not used: for it Megatron's attention drops the batch axis and applies rotary
positions sequence by sequence, waiting for the device in every layer. Ours keeps [T, 1, ...], and our attention turns
each token by its own position."""


ROOT = -1
"""Parent of a segment that continues no other."""


@dataclass(frozen=True)
class Chunks:
    """This rank's chunks of a row, two of each sequence, for a kernel that aligns the last query of a chunk with its
    last key."""

    borders: Borders
    """Queries are this rank's tokens, keys are `keys_V`."""
    keys_V: Tensor
    """int64: tokens of the row that each chunk attends to, chunk after chunk: its sequence up to the chunk's last
    token. A token is in it twice at most."""


@dataclass
class PackedRow(PackedSeqParams):
    """Borders of the sequences in a row of T tokens. Made by `packed_row`, for one forward of one model.

    It is passed through Megatron's layers as their `packed_seq_params`.

    Example: a prompt of 4 tokens with continuations of 2 and 3, then a sequence of 5 tokens alone, which is a further
    root: `lengths=(4, 2, 3, 5)`, `parents=(ROOT, 0, 0, ROOT)`.
    """

    lengths: tuple[int, ...] = ()
    """Tokens of each segment, at least 1. On the host, so that shapes need no wait for the device."""
    parents: tuple[int, ...] = ()
    """For each segment the one that it continues, or `ROOT`. Empty: all segments are roots. Levels stand one after the
    other, and the continuations of a segment are neighbours, so that everything that continues a segment at one level
    is contiguous. Further roots may follow the last level."""
    positions_T: Tensor | None = None
    """int64: the position of each of this rank's tokens in its own sequence."""
    rotary_cos_sin: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, 1, D / 2], set by a model with rotary positions."""
    share: ContextShare | None = None
    """This rank's tokens of the row; None: all."""

    @property
    def has_trees(self) -> bool:
        """True if some segment continues another one."""
        return any(parent != ROOT for parent in self.parents)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return sum(self.lengths)

    @property
    def num_local_tokens(self) -> int:
        return self.num_tokens if self.share is None else len(self.share.own_S)

    @cached_property
    def trees(self) -> Trees:
        """Attention plan for a row that has trees, made once for all layers."""
        assert self.positions_T is not None
        return plan_trees(self.lengths, self.parents, self.positions_T.device)

    @cached_property
    def chunks(self) -> Chunks:
        """This rank's chunks under context parallelism, made once for all layers."""
        assert self.share is not None, "a whole row has no chunks"
        cp, rank, device = self.share.group.size(), self.share.group.rank(), self.share.own_S.device
        lengths_N = torch.tensor(self.lengths, dtype=torch.int64)
        sizes_N = lengths_N // (2 * cp)
        starts_M = (lengths_N.cumsum(0) - lengths_N).repeat_interleave(2)
        keys_M = torch.stack([(rank + 1) * sizes_N, (2 * cp - rank) * sizes_N], 1).flatten()
        borders = block_borders(torch.stack([sizes_N.repeat_interleave(2), keys_M]), device)
        return Chunks(borders, ranges(starts_M, keys_M).to(device))

    def thd(self) -> PackedSeqParams:
        """The row in TransformerEngine's format. It states whole sequences, also under context parallelism, for which
        TransformerEngine divides by the size of its own group."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_kv=self.cu_seqlens_kv,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
        )


def packed_row(
    lengths: Sequence[int],
    device: torch.device,
    cp_group: dist.ProcessGroup | None = None,
    parents: Sequence[int] = (),
) -> PackedRow:
    """A row of segments of these lengths. With `cp_group`, this rank's share of the row; then every length is a
    multiple of twice the ranks, and no segment continues another.

    parents: see `PackedRow.parents`
    """
    assert min(lengths, default=0) > 0, f"a packed row holds segments of one token or more, got lengths {lengths}"
    assert not parents or cp_group is None, "context parallelism splits whole sequences"
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    lengths_N = torch.tensor(lengths)
    first_N = torch.tensor(_first_positions(lengths, parents)) - cu_seqlens[:-1].long()
    positions_T = torch.arange(int(cu_seqlens[-1])) + first_N.repeat_interleave(lengths_N)
    share = None if cp_group is None else context_share(lengths, cp_group, device)
    positions_T = positions_T.to(device)
    if share is not None:
        positions_T = positions_T[share.own_S]
    cu_seqlens = cu_seqlens.to(device)
    return PackedRow(
        qkv_format=QKV_FORMAT,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
        parents=tuple(parents),
        positions_T=positions_T,
        share=share,
    )


def _first_positions(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """For each segment the position of its first token in its sequences: behind everything that it continues."""
    if not parents:
        return [0] * len(lengths)
    assert len(parents) == len(lengths), f"{len(parents)} parents of {len(lengths)} segments"
    firsts: list[int] = []
    for segment, parent in enumerate(parents):
        assert parent < segment, f"segment {segment} continues {parent}, which is not before it"
        firsts.append(0 if parent == ROOT else firsts[parent] + lengths[parent])
    return firsts


def path_to(last: int, parents: Sequence[int]) -> list[int]:
    """The segments of the sequence that ends with segment `last`, from its root on."""
    path = [last]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path[::-1]
