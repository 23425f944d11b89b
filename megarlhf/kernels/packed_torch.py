"""The packed functions in torch: no loop over tokens or sequences, no wait for the device, no float atomics.

Legend: T tokens of all sequences end to end, N sequences, 3: sum, sum of squares, count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.kernels.packed_problem import Borders, Shaping, wide


def gae(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None,
    values_T: Tensor,
    scores_N: Tensor,
    borders: Borders,
    how: Shaping,
) -> tuple[Tensor, Tensor]:
    """See `packed_reference.gae`."""
    dtype = wide(logprobs_T, ref_logprobs_T, values_T, scores_N)
    values_T = values_T.to(dtype)
    behind_T = _tokens_behind(borders)
    deltas_T = torch.where(behind_T == 0, borders.spread(scores_N.to(dtype)), 0.0)
    if ref_logprobs_T is not None:
        deltas_T.sub_(_kl(ref_logprobs_T.to(dtype) - logprobs_T.to(dtype), how.kl_kind), alpha=how.kl_coef)
    deltas_T[:-1].add_(torch.where(behind_T[:-1] > 0, values_T[1:], 0.0), alpha=how.gamma)
    advantages_T = _scan(deltas_T.sub_(values_T), behind_T, borders.longest, how.gamma * how.lam)
    return advantages_T, advantages_T + values_T


def discounted_returns(rewards_T: Tensor, borders: Borders, gamma: float) -> Tensor:
    """See `packed_reference.discounted_returns`."""
    rewards_T = rewards_T.to(wide(rewards_T), copy=True)
    return _scan(rewards_T, _tokens_behind(borders), borders.longest, gamma)


def moments(x_T: Tensor, mask_T: Tensor | None, borders: Borders) -> Tensor:
    """See `packed_reference.moments`."""
    x_T = x_T.double()
    if mask_T is None:
        counts_N = borders.cu_seqlens.diff().double()
    else:
        x_T = torch.where(mask_T, x_T, 0.0)
        counts_N = _segment_sums(mask_T.double(), borders.cu_seqlens)
    sums = (_segment_sums(part_T, borders.cu_seqlens) for part_T in (x_T, x_T.square()))
    return torch.stack([*sums, counts_N], 1)


def add_groups(moments_N3: Tensor, groups_N: Tensor) -> Tensor:
    """See `packed_reference.add_groups`. Sequences are sorted by group, stably: sums run in their order.

    The segments are as many as sequences, the last ones empty: how many groups there are only the device knows.
    """
    groups_N, order_N = groups_N.sort(stable=True)
    segment_N = torch.zeros_like(order_N)
    segment_N[1:] = (groups_N[1:] != groups_N[:-1]).cumsum(0)
    offsets = torch.searchsorted(segment_N, torch.arange(len(order_N) + 1, device=order_N.device))
    columns = [_segment_sums(column_N.contiguous(), offsets) for column_N in moments_N3[order_N].unbind(1)]
    return torch.empty_like(moments_N3).index_copy_(0, order_N, torch.stack(columns, 1)[segment_N])


def standardise(
    x_T: Tensor, mask_T: Tensor | None, borders: Borders, mean_N: Tensor, scale_N: Tensor, shift_mean: bool
) -> Tensor:
    """See `packed_reference.standardise`."""
    mean_T = borders.spread(mean_N)
    found_T = (x_T.double() - mean_T) * borders.spread(scale_N)
    if not shift_mean:
        found_T += mean_T
    if mask_T is not None:
        found_T = torch.where(mask_T, found_T, 0.0)
    return found_T.to(wide(x_T))


def _tokens_behind(borders: Borders) -> Tensor:
    """How many tokens of its sequence stand behind each, [T]."""
    ends_T = borders.spread(borders.cu_seqlens[1:])
    return ends_T - 1 - torch.arange(borders.num_tokens, device=ends_T.device)


def _scan(terms_T: Tensor, behind_T: Tensor, longest: int, factor: float) -> Tensor:
    """A_t = x_t + factor A_{t+1} in each sequence, by doubling; over its argument.

    After k steps a token has the terms of 2^k tokens, itself first; each step adds what the token 2^k further on has.
    log2(longest) passes over T numbers. Nothing is added that is not the sequence's own, not even times zero: a NaN
    stays in its sequence, and reaches the tokens before it alone.
    """
    step = 1
    while step < longest:
        further_T = torch.where(behind_T[:-step] >= step, terms_T[step:], 0.0)
        terms_T[:-step].add_(further_T, alpha=factor**step)
        step *= 2
    return terms_T


def _segment_sums(x_T: Tensor, offsets: Tensor) -> Tensor:
    """One sum a segment in a fixed order; 0 for an empty one. `unsafe` leaves out a check that waits for the device."""
    if len(offsets) == 2:  # a GPU gives a segment to one block of threads
        return x_T.sum()[None]
    return torch.segment_reduce(x_T, "sum", offsets=offsets, axis=0, unsafe=True)


def _kl(log_ratio_T: Tensor, kind: str) -> Tensor:
    """As algo/kl.py, which stands on the same floor of the house."""
    if kind == "k1":
        return -log_ratio_T
    if kind == "k2":
        return log_ratio_T.square() / 2
    return torch.expm1(log_ratio_T) - log_ratio_T
