"""Passes over a tile of logits in plain torch, block by block, so that a block stays in cache.

Legend: T rows, V columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarlhf.kernels.statistics import LOG_ZERO, Merged, VocabRange, merge
from megarlhf.kernels.tiles import LogprobOptions, OutputGradients

_BLOCK_ROWS, _BLOCK_COLUMNS = 1024, 1024
"""Three blocks of this size fit into the cores' shared cache. Smaller ones cost more calls than they save."""


class TorchTiles:
    """`tiles.Tiles` on any device. Keeps memory for two blocks."""

    def __init__(self, options: LogprobOptions) -> None:
        self.options = options
        self._scratch: Tensor | None = None

    def update(
        self, table_T4: Tensor, logits_TV: Tensor, labels_T: Tensor, columns: VocabRange, *, fresh: bool
    ) -> None:
        """See `Tiles.update`."""
        if fresh:
            table_T4.zero_()[:, 0] = torch.finfo(table_T4.dtype).min
        for rows, cut in _blocks(logits_TV.size(0), columns.count):
            max_T, sum_T, moment_T, label_T = table_T4[rows].unbind(1)
            shifted_TV, exp_TV = self._pair(logits_TV[rows, cut], table_T4.dtype)
            z_TV = _scaled(logits_TV[rows, cut], self.options.scale, exp_TV)
            label_T.add_(_label_column(z_TV, labels_T[rows] - (columns.first + cut.start)))
            new_max_T = torch.maximum(max_T, z_TV.amax(1))
            torch.exp(torch.sub(z_TV, new_max_T[:, None], out=shifted_TV), out=exp_TV)
            block_sum_T = exp_TV.sum(1)
            # Rescale the sums so far to the new maximum.
            moved_T = (max_T - new_max_T).clamp_(min=LOG_ZERO)
            rescale_T = moved_T.exp()
            if self.options.entropy:
                block_moment_T = torch.mul(exp_TV, shifted_TV, out=exp_TV).sum(1)
                if bool(block_moment_T.isnan().any()):
                    shifted_TV.clamp_(min=LOG_ZERO)
                    block_moment_T = torch.mul(shifted_TV.exp(), shifted_TV, out=exp_TV).sum(1)
                moment_T.add_(sum_T * moved_T).mul_(rescale_T).add_(block_moment_T)
            sum_T.mul_(rescale_T).add_(block_sum_T)
            max_T.copy_(new_max_T)

    def merge(self, tables_RT4: Tensor, labels_T: Tensor) -> Merged:
        """See `Tiles.merge`."""
        return merge(tables_RT4, labels_T != self.options.ignore_index, self.options.entropy)

    def gradient(self, out_TV: Tensor, logits_TV: Tensor, columns: VocabRange, outputs: OutputGradients) -> None:
        """See `Tiles.gradient`."""
        merged, labels_T, scale = outputs.merged, outputs.labels_T, self.options.scale
        kept_T = labels_T != self.options.ignore_index
        # The chain rule through logits x scale, on the vectors: -p (by_h (log p + entropy) + by).
        by_T = merged.sum_T.new_zeros(()) if outputs.grad_logprobs_T is None else outputs.grad_logprobs_T
        by_T = torch.where(kept_T, by_T * scale, 0.0)
        by_h_T = outputs.grad_entropy_T
        by_h_T = None if by_h_T is None else torch.where(kept_T, by_h_T * scale, 0.0)
        log_sum_T = merged.sum_T.log()
        minus_T = -by_T / merged.sum_T
        for rows, cut in _blocks(logits_TV.size(0), columns.count):
            shifted_TV, exp_TV = self._pair(logits_TV[rows, cut], merged.sum_T.dtype)
            z_TV = _scaled(logits_TV[rows, cut], scale, exp_TV)
            if out_TV.dtype == exp_TV.dtype:
                exp_TV = out_TV[rows, cut]
            max_T1 = merged.max_T[rows][:, None]
            if by_h_T is None:
                torch.sub(z_TV, max_T1, out=exp_TV).exp_().mul_(minus_T[rows][:, None])
            else:
                torch.exp(torch.sub(z_TV, max_T1, out=shifted_TV), out=exp_TV)
                shifted_TV.clamp_(min=LOG_ZERO).add_((merged.entropy_T - log_sum_T)[rows][:, None])
                shifted_TV.mul_(by_h_T[rows][:, None]).add_(by_T[rows][:, None])
                exp_TV.mul_(shifted_TV).mul_((-1.0 / merged.sum_T[rows])[:, None])
            _add_to_label(exp_TV, labels_T[rows] - (columns.first + cut.start), by_T[rows])
            if out_TV.dtype != exp_TV.dtype:
                out_TV[rows, cut] = exp_TV
        out_TV[:, columns.count :] = 0.0
        if not bool(kept_T.all()):
            # Not a product with 0: the logits there may be NaN.
            out_TV[~kept_T] = 0.0

    def _pair(self, like_TV: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two blocks of scratch memory of this shape."""
        size = like_TV.numel()
        if self._scratch is None or self._scratch.size(1) < size:
            self._scratch = torch.empty(2, size, dtype=dtype, device=like_TV.device)
        first, second = self._scratch[:, :size].view(2, *like_TV.shape)
        return first, second


def _blocks(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    for top in range(0, num_rows, _BLOCK_ROWS):
        for left in range(0, num_columns, _BLOCK_COLUMNS):
            yield slice(top, min(top + _BLOCK_ROWS, num_rows)), slice(left, min(left + _BLOCK_COLUMNS, num_columns))


def _scaled(logits_TV: Tensor, scale: float, into_TV: Tensor) -> Tensor:
    """logits x scale in the dtype of `into_TV`; the logits themselves where nothing changes."""
    if scale == 1.0 and logits_TV.dtype == into_TV.dtype:
        return logits_TV
    into_TV.copy_(logits_TV)
    return into_TV if scale == 1.0 else into_TV.mul_(scale)


def _label_column(z_TV: Tensor, local_T: Tensor) -> Tensor:
    """[T]: the label's column of each row; 0 where the label is outside."""
    inside_T = (local_T >= 0) & (local_T < z_TV.size(1))
    z_T = z_TV.gather(1, local_T.clamp(0, z_TV.size(1) - 1)[:, None])[:, 0]
    return torch.where(inside_T, z_T, 0.0)


def _add_to_label(out_TV: Tensor, local_T: Tensor, value_T: Tensor) -> None:
    inside_T = (local_T >= 0) & (local_T < out_TV.size(1))
    column_T1 = local_T.clamp(0, out_TV.size(1) - 1)[:, None]
    out_TV.scatter_add_(1, column_T1, torch.where(inside_T, value_T, 0.0)[:, None])
