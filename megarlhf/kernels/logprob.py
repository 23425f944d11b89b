"""Log-prob and entropy of labels from logits that are there, over a vocabulary sharded by tensor parallelism.

Keeps the logits and four numbers a token; the softmax is made again in the backward, which needs no communication.

Legend: T tokens, V vocabulary columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.kernels.statistics import Merged, Statistics, VocabRange
from megarlhf.kernels.tiles import LogprobOptions, Tiles


class TokenLogprobs(torch.autograd.Function):
    """apply(logits_TV, labels_T, columns, options, group, tiles) -> (logprobs_T, entropy_T)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        columns: VocabRange,
        options: LogprobOptions,
        group: dist.ProcessGroup | None,
        tiles: Tiles,
    ) -> tuple[Tensor, Tensor]:
        stats = Statistics.of(logits_TV)
        tiles.update(stats, logits_TV, labels_T, columns, options, fresh=True)
        merged = tiles.merge(stats.gathered(group), labels_T, options)
        ctx.save_for_backward(logits_TV, labels_T, merged.max_T, merged.sum_T, merged.entropy_T)
        ctx.columns, ctx.options, ctx.tiles = columns, options, tiles
        ctx.set_materialize_grads(False)
        if not options.entropy:
            ctx.mark_non_differentiable(merged.entropy_T)
        return merged.logprobs_T, merged.entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropy_T = grads
        logits_TV, labels_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        out_TV = torch.empty_like(logits_TV)
        merged = Merged(max_T, sum_T, entropy_T, entropy_T)
        ctx.tiles.gradient(
            out_TV, logits_TV, labels_T, ctx.columns, merged, grad_logprobs_T, grad_entropy_T, ctx.options
        )
        return (out_TV, *[None] * 5)
