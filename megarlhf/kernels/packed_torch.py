"""torch backend of the packed functions: no loop over tokens or sequences, no float atomics.

On a GPU a scan waits for the device once, since its shapes depend on the lengths; sums and whitening do not wait.

Legend: T tokens of all sequences end to end, N sequences, K sequences with a token, L tokens of a block, B blocks,
3: sum, sum of squares, count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.algo.kl import kl_estimate
from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs
from megarlhf.kernels.statistics import working_dtype

_BLOCK = 64
"""Tokens of a block."""


def gae(inputs: GAEInputs, sequences: CuSeqlens) -> tuple[Tensor, Tensor]:
    """See `algo.gae.gae`."""
    dtype, gamma, ref_logprobs_T = inputs.dtype, inputs.gamma, inputs.ref_logprobs_T
    values_T = inputs.values_T.to(dtype)
    present_N = sequences.cu_seqlens.diff() > 0
    last_K = sequences.cu_seqlens[1:][present_N] - 1
    # The value after a sequence's last token is another sequence's.
    next_T = torch.cat([values_T[1:], values_T[:1]]).index_fill_(0, last_K, 0.0)
    terms_T = next_T.mul_(gamma).sub_(values_T)
    if ref_logprobs_T is not None:
        kl_T = kl_estimate(inputs.logprobs_T.to(dtype), ref_logprobs_T.to(dtype), inputs.kl_kind)
        terms_T.sub_(kl_T, alpha=inputs.kl_coef)
    if inputs.token_rewards_T is not None:
        terms_T.add_(inputs.token_rewards_T.to(dtype))
    terms_T.index_copy_(0, last_K, terms_T[last_K] + inputs.scores_N[present_N].to(dtype))
    advantages_T = _scan(terms_T, sequences, gamma * inputs.lam)
    return advantages_T, advantages_T + values_T


def moments(x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens) -> Tensor:
    """See `algo.whitening.moments`."""
    x_T = x_T.double()
    if mask_T is None:
        counts_N = sequences.cu_seqlens.diff().double()
    else:
        x_T = torch.where(mask_T, x_T, 0.0)
        counts_N = _segment_sums(mask_T.double(), sequences.cu_seqlens)
    sums = (_segment_sums(part_T, sequences.cu_seqlens) for part_T in (x_T, x_T.square()))
    return torch.stack([*sums, counts_N], 1)


def group_moments(moments_N3: Tensor, groups_N: Tensor) -> Tensor:
    """See `algo.whitening.group_moments`. Sequences are sorted by group, stably, so that sums run in their order.

    There are as many segments as sequences, the last ones empty, since only the device knows the number of groups.
    """
    groups_N, order_N = groups_N.sort(stable=True)
    segment_N = torch.zeros_like(order_N)
    segment_N[1:] = (groups_N[1:] != groups_N[:-1]).cumsum(0)
    offsets = torch.searchsorted(segment_N, torch.arange(len(order_N) + 1, device=order_N.device))
    columns = [_segment_sums(column_N.contiguous(), offsets) for column_N in moments_N3[order_N].unbind(1)]
    return torch.empty_like(moments_N3).index_copy_(0, order_N, torch.stack(columns, 1)[segment_N])


def whiten(
    x_T: Tensor, mask_T: Tensor | None, sequences: CuSeqlens, mean_N: Tensor, scale_N: Tensor, shift_mean: bool
) -> Tensor:
    """See `algo.whitening.whiten`."""
    mean_T = sequences.repeat_per_token(mean_N)
    out_T = (x_T.double() - mean_T) * sequences.repeat_per_token(scale_N)
    if not shift_mean:
        out_T += mean_T
    if mask_T is not None:
        out_T = torch.where(mask_T, out_T, 0.0)
    return out_T.to(working_dtype(x_T))


def _scan(terms_T: Tensor, sequences: CuSeqlens, factor: float) -> Tensor:
    """A_t = x_t + factor A_{t+1} in each sequence, by doubling.

    After k steps a token has the sum over 2^k tokens, itself first; step k adds the sum of the token 2^k further on.
    First this is done in blocks of one sequence, counted from its end and filled up with zeros before its first token;
    then over the first tokens of blocks; then each block adds the sum that follows it. A token only gets terms of later
    tokens of its own sequence, not even others times zero, so a NaN reaches only the tokens before it.
    """
    if sequences.num_tokens == 0:
        return terms_T.clone()
    blocks_N = (sequences.cu_seqlens.diff() + (_BLOCK - 1)) // _BLOCK
    ends_N = blocks_N.cumsum(0)
    num_blocks = int(ends_N[-1])
    places_T = torch.arange(sequences.num_tokens, device=terms_T.device)
    places_T += sequences.repeat_per_token(ends_N * _BLOCK - sequences.cu_seqlens[1:])
    scanned_BL = terms_T.new_zeros(num_blocks * _BLOCK).index_copy_(0, places_T, terms_T).view(num_blocks, _BLOCK)
    step = 1
    while step < _BLOCK:
        scanned_BL[:, :-step] += scanned_BL[:, step:] * factor**step
        step *= 2
    # Number of blocks of the same sequence behind each block.
    behind_B = ends_N.repeat_interleave(blocks_N, output_size=num_blocks) - 1
    behind_B -= torch.arange(num_blocks, device=terms_T.device)
    first_B = scanned_BL[:, 0].clone()
    step = 1
    while step * _BLOCK < sequences.max_seqlen:
        further_B = torch.where(behind_B[:-step] >= step, first_B[step:], 0.0)
        first_B[:-step].add_(further_B, alpha=factor ** (step * _BLOCK))
        step *= 2
    following_B = torch.where(behind_B[:-1] > 0, first_B[1:], 0.0)
    powers_L = torch.tensor([factor ** (_BLOCK - i) for i in range(_BLOCK)], dtype=terms_T.dtype)
    scanned_BL[:-1].addcmul_(following_B[:, None], powers_L.to(terms_T.device))
    return scanned_BL.view(-1).index_select(0, places_T)


def _segment_sums(x_T: Tensor, offsets: Tensor) -> Tensor:
    """Sums of segments, each in a fixed order; 0 for an empty one. `unsafe` skips a check that waits for the device."""
    if len(offsets) == 2:  # for a single segment: a GPU would give it to one block of threads
        return x_T.sum()[None]
    return torch.segment_reduce(x_T, "sum", offsets=offsets, axis=0, unsafe=True)
