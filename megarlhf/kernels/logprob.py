"""Log-prob and entropy of labels from existing logits, over a vocabulary sharded by tensor parallelism.

Keeps the logits and four numbers per token. The backward recomputes the softmax and needs no communication.

Legend: T tokens, V vocabulary columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.kernels.statistics import Merged, VocabRange, empty_table, gather_tables
from megarlhf.kernels.tiles import OutputGradients, Tiles


class TokenLogprobs(torch.autograd.Function):
    """apply(logits_TV, labels_T, columns, group, tiles) -> (logprobs_T, entropy_T)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        columns: VocabRange,
        group: dist.ProcessGroup | None,
        tiles: Tiles,
    ) -> tuple[Tensor, Tensor]:
        table_T4 = empty_table(logits_TV)
        tiles.update(table_T4, logits_TV, labels_T, columns, fresh=True)
        merged = tiles.merge(gather_tables(table_T4, group), labels_T)
        ctx.save_for_backward(logits_TV, labels_T, merged.max_T, merged.sum_T, merged.entropy_T)
        ctx.columns, ctx.tiles = columns, tiles
        ctx.set_materialize_grads(False)
        if not tiles.options.entropy:
            ctx.mark_non_differentiable(merged.entropy_T)
        return merged.logprobs_T, merged.entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TV, labels_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        out_TV = torch.empty_like(logits_TV)
        outputs = OutputGradients(Merged(max_T, sum_T, entropy_T, entropy_T), labels_T, *grads)
        ctx.tiles.gradient(out_TV, logits_TV, ctx.columns, outputs)
        return (out_TV, *[None] * 4)
