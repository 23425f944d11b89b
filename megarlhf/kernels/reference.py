"""Specification of the log-prob kernels, in plain torch. Computes in fp32, or in fp64 for fp64 logits.

Legend: T tokens, V vocabulary columns of this tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels.statistics import gather_tables, working_dtype
from megarlhf.kernels.tiles import LogprobOptions


def token_logprobs(
    logits_TV: Tensor, labels_T: Tensor, options: LogprobOptions, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """`dispatch.token_logprobs` with a whole softmax in memory.

    Maths:   logprob = (z_y - m) - log s;  entropy = log s - sum e^(z - m) (z - m) / s, with m = max z and
             s = sum e^(z - m) over all ranks; columns from `options.vocab` on (padding) are left out.
    Labels:  in [0, options.vocab) or `ignore_index`, checked by dispatch.py
    """
    logprobs_T, entropy_T = _TokenLogprobs.apply(logits_TV, labels_T, options, group)
    return logprobs_T, entropy_T if options.entropy else torch.zeros_like(logprobs_T)


def linear_token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    options: LogprobOptions,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    rows_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of all logits hidden @ weight^T, computed at once, in fp32 (fp64 for fp64).

    Shapes:  hidden_TH [T, H], or [T / tp, H] of this rank under `sequence_parallel`; weight_VH [V, H], labels_T [T]
             and rows_T [T] int64, the row for each label (None: its own) -> ([T], [T])
    Group:   as Megatron's column-parallel layer: sharded hidden states are gathered, their gradient is summed over the
             ranks (and scattered).
    """
    if group is not None:
        hidden_TH = _ToColumns.apply(hidden_TH, group, sequence_parallel)
    if rows_T is not None:
        hidden_TH = hidden_TH[rows_T]
    # Hidden states of ignored tokens may be NaN, and 0 x NaN would reach the weight's gradient.
    hidden_TH = hidden_TH.masked_fill((labels_T == options.ignore_index)[:, None], 0.0)
    dtype = working_dtype(hidden_TH)
    return token_logprobs(hidden_TH.to(dtype) @ weight_VH.to(dtype).t(), labels_T, options, group)


class _ToColumns(torch.autograd.Function):
    """Input of a column-parallel product: gathers hidden states, and sums their gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if not sequence_parallel:
            return hidden_TH.view_as(hidden_TH)
        parts = [torch.empty_like(hidden_TH) for _ in range(group.size())]
        dist.all_gather(parts, hidden_TH.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed_TH = grads[0].clone()
        dist.all_reduce(summed_TH, group=ctx.group)
        if ctx.sequence_parallel:
            summed_TH = summed_TH.chunk(ctx.group.size())[ctx.group.rank()]
        return summed_TH, None, None


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and three numbers per token; the backward recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, options: LogprobOptions, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        width = logits_TV.size(-1)
        first = 0 if group is None else group.rank() * width
        z_TV = _scaled(logits_TV, options.temperature, options.vocab - first)
        kept_T = labels_T != options.ignore_index
        local_T = labels_T - first
        mine_T = kept_T & (local_T >= 0) & (local_T < width)
        local_T = local_T.clamp(0, width - 1)
        max_T = z_TV.amax(-1)
        # A rank that holds only padding has max -inf; any finite stand-in leaves its sums at 0.
        shift_T = torch.where(max_T.isfinite(), max_T, torch.zeros_like(max_T))
        weight_TV = (z_TV - shift_T[:, None]).exp()
        sum_T = weight_TV.sum(-1)
        moment_T = _times(weight_TV, z_TV - shift_T[:, None]).sum(-1)
        label_T = torch.where(mine_T, z_TV.gather(1, local_T[:, None])[:, 0], torch.zeros_like(sum_T))
        table_T4 = torch.stack([max_T, sum_T, moment_T, label_T], -1)
        max_T, sum_T, entropy_T, logprobs_T = _merge(gather_tables(table_T4, group), kept_T)
        ctx.save_for_backward(logits_TV, local_T, mine_T, kept_T, max_T, sum_T, entropy_T)
        ctx.temperature, ctx.num_columns = options.temperature, options.vocab - first
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropy_T = grads
        logits_TV, local_T, mine_T, kept_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        shifted_TV = _scaled(logits_TV, ctx.temperature, ctx.num_columns) - max_T[:, None]
        prob_TV = shifted_TV.exp() / sum_T[:, None]
        grad_logprobs_T = torch.where(kept_T, grad_logprobs_T, 0.0)
        grad_entropy_T = torch.where(kept_T, grad_entropy_T, 0.0)
        # d entropy / dz = -p (log p + entropy)
        log_prob_TV = shifted_TV - sum_T.log()[:, None]
        grad_TV = -prob_TV * grad_logprobs_T[:, None]
        grad_TV -= _times(prob_TV, log_prob_TV + entropy_T[:, None]) * grad_entropy_T[:, None]
        owned_T = torch.where(mine_T, grad_logprobs_T, 0.0)
        grad_TV.scatter_add_(1, local_T[:, None], owned_T[:, None])
        grad_TV = grad_TV.masked_fill(~kept_T[:, None], 0.0)
        return (grad_TV / ctx.temperature).to(logits_TV.dtype), None, None, None


def _scaled(logits_TV: Tensor, temperature: float, num_columns: int) -> Tensor:
    """logits / temperature in fp32 (fp64 for fp64), -inf from column `num_columns` on."""
    z_TV = logits_TV.to(working_dtype(logits_TV)) / temperature
    if num_columns < z_TV.size(-1):
        z_TV[:, max(num_columns, 0) :] = -torch.inf
    return z_TV


def _times(weight_TV: Tensor, value_TV: Tensor) -> Tensor:
    """weight x value, with 0 x (-inf) = 0."""
    return weight_TV * torch.where(weight_TV > 0, value_TV, torch.zeros_like(value_TV))


def _merge(tables_RT4: Tensor, kept_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranks' (max, sum, moment, label's logit) -> global max, sum, entropy and log-prob."""
    max_RT, sum_RT, moment_RT, label_RT = tables_RT4.unbind(-1)
    max_T = max_RT.amax(0)
    max_T = torch.where(max_T.isfinite(), max_T, torch.zeros_like(max_T))
    # e^(m_r - m); 0 for a rank without a finite column.
    scale_RT = (max_RT - max_T).exp()
    # A rank's moment is about its own max; about the global one it gains sum_r (m_r - m).
    shift_RT = torch.where(scale_RT > 0, max_RT - max_T, torch.zeros_like(max_RT))
    sum_T = (sum_RT * scale_RT).sum(0)
    moment_T = ((moment_RT + sum_RT * shift_RT) * scale_RT).sum(0)
    entropy_T = torch.where(kept_T, sum_T.log() - moment_T / sum_T, 0.0)
    logprobs_T = torch.where(kept_T, (label_RT.sum(0) - max_T) - sum_T.log(), 0.0)
    return max_T, sum_T, entropy_T, logprobs_T
