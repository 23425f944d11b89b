"""Sequences end to end in one row: what a model needs to keep them apart, and to see what they share.

A row consists of segments. A segment that continues another one sees its own past and all of that one, and what that
one continues: so segments form trees, and a sequence is the way from a root to a segment. Without continuations each
segment is a sequence.

Legend: T tokens of the row, or this rank's T / cp of them under context parallelism; N segments, M chunks, V keys of
all chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarlhf.parallel.context import ContextShare, context_share, ranges
from megarlhf.parallel.packing.trees import Trees, plan_trees

QKV_FORMAT = "packed"
"""Not Megatron's `thd`, for which its attention drops the batch axis and applies rotary positions sequence by
sequence, waiting for the device in every layer. Ours keeps [T, 1, ...], and our attention turns each token by its own
position."""


ROOT = -1
"""In place of the number of a segment that another one continues: it continues none."""


@dataclass(frozen=True)
class Chunks:
    """This rank's chunks of a row, two of each sequence, as sequences of their own for a kernel that takes as many keys
    as it likes for each; it aligns the last query with the last key."""

    cu_queries: Tensor
    """int32: where the queries of each chunk begin in this rank's tokens."""
    cu_keys: Tensor
    """int32: where its keys begin in `keys_V`."""
    longest_query: int
    longest_key: int
    keys_V: Tensor
    """int64: the tokens of the row that each chunk attends to, chunk after chunk: all of its sequence up to its own
    last. No token is in it more than twice."""


@dataclass
class PackedRow(PackedSeqParams):
    """Where the sequences in a row of T tokens begin and end. Made by `packed_row`, for one forward of one model.

    It travels through Megatron's layers as their `packed_seq_params`.
    """

    lengths: tuple[int, ...] = ()
    """Tokens of each segment, none of them 0: on the host, so that shapes need no wait for the device."""
    parents: tuple[int, ...] = ()
    """By segment the one that it continues, `ROOT` where it begins a sequence. Empty: all begin one. Level stands
    after level, and the continuations of a segment are neighbours, so that at each level all that continues a segment
    is one stretch of the row; behind the last level there may be further roots."""
    positions_T: Tensor | None = None
    """int64: the position of each of this rank's tokens in its own sequence."""
    rotary_cos_sin: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, 1, D / 2] of a model with rotary positions, which adds them."""
    share: ContextShare | None = None
    """Which tokens of the row are this rank's; None: all."""

    @property
    def has_trees(self) -> bool:
        """Some segment continues another one."""
        return any(parent != ROOT for parent in self.parents)

    @property
    def num_tokens(self) -> int:
        """Of the whole row."""
        return sum(self.lengths)

    @property
    def num_local_tokens(self) -> int:
        return self.num_tokens if self.share is None else len(self.share.own_S)

    @cached_property
    def trees(self) -> Trees:
        """Made once for all layers; of a row that has some."""
        assert self.positions_T is not None
        return plan_trees(self.lengths, self.parents, self.positions_T.device)

    @cached_property
    def chunks(self) -> Chunks:
        """Made once for all layers; under context parallelism only."""
        assert self.share is not None, "a whole row has no chunks"
        cp, rank, device = self.share.group.size(), self.share.group.rank(), self.share.own_S.device
        lengths_N = torch.tensor(self.lengths, dtype=torch.int64)
        sizes_N = lengths_N // (2 * cp)
        starts_M = (lengths_N.cumsum(0) - lengths_N).repeat_interleave(2)
        keys_M = torch.stack([(rank + 1) * sizes_N, (2 * cp - rank) * sizes_N], 1).flatten()
        queries_M = sizes_N.repeat_interleave(2)
        cu_2M = torch.zeros(2, len(keys_M) + 1, dtype=torch.int32)
        cu_2M[:, 1:] = torch.stack([queries_M, keys_M]).cumsum(1)
        cu_2M = cu_2M.to(device)
        return Chunks(
            cu_queries=cu_2M[0],
            cu_keys=cu_2M[1],
            longest_query=int(queries_M.max()),
            longest_key=int(keys_M.max()),
            keys_V=ranges(starts_M, keys_M).to(device),
        )

    def thd(self) -> PackedSeqParams:
        """The same in the format in which TransformerEngine's attention takes them: of whole sequences, also under
        context parallelism, for which it divides by the ranks of its own group."""
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
    """A row of segments of these lengths, which together are the whole row; of it, this rank's share over `cp_group`,
    for which every length is a multiple of twice the ranks and no segment continues another.

    parents: see `PackedRow.parents`
    """
    assert min(lengths, default=0) > 0, f"a packed row holds segments of one token or more, got lengths {lengths}"
    assert not parents or cp_group is None, "context parallelism cuts whole sequences"
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    lengths_N = torch.tensor(lengths)
    first_N = torch.tensor(first_positions(lengths, parents)) - cu_seqlens[:-1].long()
    positions_T = torch.arange(int(cu_seqlens[-1])) + first_N.repeat_interleave(lengths_N)
    share = None if cp_group is None else context_share(lengths, cp_group, device)
    positions_T = positions_T.to(device)
    if share is not None:
        positions_T = positions_T[share.own_S]
    cu_seqlens = cu_seqlens.to(device)
    shared: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    shared |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    shared |= {"lengths": tuple(lengths), "parents": tuple(parents)}
    return PackedRow(qkv_format=QKV_FORMAT, positions_T=positions_T, share=share, **shared)


def first_positions(lengths: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
    """By segment the position of its first token in the sequences that go through it: behind what it continues."""
    if not parents:
        return [0] * len(lengths)
    assert len(parents) == len(lengths), f"{len(parents)} parents of {len(lengths)} segments"
    firsts: list[int] = []
    for number, parent in enumerate(parents):
        assert parent < number, f"segment {number} continues {parent}, which does not stand before it"
        firsts.append(0 if parent == ROOT else firsts[parent] + lengths[parent])
    return firsts


def way_to(last: int, parents: Sequence[int]) -> list[int]:
    """The segments of a sequence that ends with `last`, from its root on."""
    way = [last]
    while parents[way[-1]] != ROOT:
        way.append(parents[way[-1]])
    return way[::-1]
