"""Context parallelism: the columns of a micro-batch's grid that a rank computes, and gathering the whole grid.

Each sequence is split into 2 x cp equal chunks, and rank r computes chunks r and 2 cp - 1 - r. With causal attention
the work of an early and a late chunk adds up to the same on every rank. TransformerEngine and Megatron-Core's rotary
table use the same partition. Only attention mixes tokens, so only keys and values are gathered (`gather_sequence`), and
the outputs of the last stage (`ContextShare.whole`).

Legend: S columns of the grid, S' = S / cp of them on this rank, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextShare:
    """The columns of a grid that this rank computes, and the order of all ranks' columns."""

    group: dist.ProcessGroup
    own_S: Tensor
    """[S'] int64: the columns of this rank, in its order."""
    gathered_S: Tensor
    """[S] int64: the columns of rank 0, then those of rank 1, and so on."""
    place_S: Tensor
    """[S] int64: index of each column in `gathered_S`."""

    def cut(self, grid_BS: Tensor) -> Tensor:
        """Select this rank's columns: [B, S] -> [B, S']."""
        return grid_BS.index_select(1, self.own_S)

    def whole(self, outputs_XS: Tensor) -> Tensor:
        """Gather the columns of all ranks: [..., S'] -> [..., S]. All ranks continue with the same numbers, so a rank
        backpropagates through its own columns only."""
        whole: Tensor = _Outputs.apply(outputs_XS.movedim(-1, 0), self).movedim(0, -1)
        return whole


def context_share(lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> ContextShare:
    """This rank's share of a grid whose columns are sequences of these lengths, end to end. A padded grid counts as one
    sequence. Every length is a multiple of 2 x cp."""
    cp = group.size()
    gathered_S = torch.cat([zigzag(lengths, cp, rank) for rank in range(cp)])
    place_S = torch.empty_like(gathered_S)
    place_S[gathered_S] = torch.arange(len(gathered_S))
    both_2S = torch.stack([gathered_S, place_S]).to(device)
    own_S = both_2S[0].view(cp, -1)[group.rank()]
    return ContextShare(group=group, own_S=own_S, gathered_S=both_2S[0], place_S=both_2S[1])


def zigzag(lengths: Sequence[int], cp: int, rank: int) -> Tensor:
    """[S'] int64 on the CPU: the columns of chunks `rank` and 2 cp - 1 - `rank` of each sequence, in this order.

    Example: lengths [4, 8], cp 2, rank 0 -> chunks 0 and 3: [0, 3, 4, 5, 10, 11]
    """
    odd = next((length for length in lengths if length % (2 * cp)), None)
    assert odd is None, f"cp = {cp} splits a sequence into {2 * cp} equal chunks, got one of {odd} tokens"
    chunk_N = torch.tensor(lengths, dtype=torch.int64) // (2 * cp)
    start_N = 2 * cp * (chunk_N.cumsum(0) - chunk_N)
    starts_N2 = torch.stack([start_N + rank * chunk_N, start_N + (2 * cp - 1 - rank) * chunk_N], 1)
    return ranges(starts_N2.flatten(), chunk_N.repeat_interleave(2))


def ranges(starts_K: Tensor, counts_K: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + count). Integers on the CPU -> [sum of counts].

    Example: starts [5, 0], counts [2, 3] -> [5, 6, 0, 1, 2]
    """
    ends_K = counts_K.cumsum(0)
    return torch.arange(int(counts_K.sum())) + (starts_K - ends_K + counts_K).repeat_interleave(counts_K)


def gather_sequence(local_SX: Tensor, group: dist.ProcessGroup, share: ContextShare | None = None) -> Tensor:
    """Gather the columns of all ranks, in order: [S', ...] -> [S, ...]. The gradient is summed over the ranks.

    share: None where the columns are a single sequence, so that no index is needed
    """
    whole: Tensor = _Sequence.apply(local_SX, group, share)
    return whole


class _Sequence(torch.autograd.Function):
    """All-gather; reduce-scatter in the backward, in the dtype of the gradients, as under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, local_SX: Tensor, group: dist.ProcessGroup, share: ContextShare | None) -> Tensor:
        ctx.group, ctx.share = group, share
        gathered_SX = _all_gather(local_SX, group)
        if share is not None:
            return gathered_SX.index_select(0, share.place_S)
        parts = gathered_SX.chunk(2 * group.size())
        return torch.cat([*parts[0::2], *parts[1::2][::-1]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (whole_SX,), cp = gradients, ctx.group.size()
        if ctx.share is not None:
            gathered_SX = whole_SX.index_select(0, ctx.share.gathered_S)
        else:
            parts = whole_SX.chunk(2 * cp)
            gathered_SX = torch.cat([parts[chunk] for rank in range(cp) for chunk in (rank, 2 * cp - 1 - rank)])
        local_SX = gathered_SX.new_empty((gathered_SX.size(0) // cp, *gathered_SX.shape[1:]))
        dist.reduce_scatter_tensor(local_SX, gathered_SX, group=ctx.group)
        return local_SX, None, None


class _Outputs(torch.autograd.Function):
    """All-gather; selects this rank's own columns in the backward."""

    @staticmethod
    def forward(ctx: Any, local_SX: Tensor, share: ContextShare) -> Tensor:
        ctx.share = share
        return _all_gather(local_SX, share.group).index_select(0, share.place_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.share.own_S), None


def _all_gather(local_SX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts."""
    gathered_SX = local_SX.new_empty((local_SX.size(0) * group.size(), *local_SX.shape[1:]))
    dist.all_gather_into_tensor(gathered_SX, local_SX.contiguous(), group=group)
    return gathered_SX
