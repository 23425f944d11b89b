"""Fused linear layer and log-prob: log-prob and entropy from hidden states and a vocabulary matrix, without the logits.

The matrix is divided into slices of the vocabulary. A slice's logits are computed by one matrix product, reduced to
four numbers per token, and overwritten by the next slice's. Within a byte budget they are kept instead, and the
backward recomputes only the others. Since the vocabulary is divided and not the tokens, each row of the matrix's
gradient is written once, and its sum over all tokens is made inside one product, in fp32.

Legend: T tokens, K kept tokens, H hidden, V vocabulary columns of this rank, or of a slice of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarlhf.kernels.matmul import addmm_into, as_matmul_input, matmul_into
from megarlhf.kernels.statistics import Merged, VocabRange, empty_table, gather_tables, working_dtype
from megarlhf.kernels.tiles import OutputGradients, Tiles


@dataclass(frozen=True)
class LinearLogprobOptions:
    """Options of `LinearTokenLogprobs`."""

    columns: VocabRange
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None for one rank."""
    sequence_parallel: bool
    """Each rank holds the hidden states of its part of the tokens, and the labels of all tokens."""
    save_bytes: int
    tiles: Tiles
    rows_repeat: bool = False
    """Several labels may use the same row of hidden states."""

    @property
    def gathers(self) -> bool:
        """True if hidden states are gathered from several ranks."""
        return self.group is not None and self.sequence_parallel


class LinearTokenLogprobs(torch.autograd.Function):
    """apply(hidden_TH, weight_VH, labels_K, rows_K or None, options) -> (logprobs_K, entropy_K)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_K: Tensor,
        rows_K: Tensor | None,
        options: LinearLogprobOptions,
    ) -> tuple[Tensor, Tensor]:
        chosen_KH = _select_rows(hidden_TH, rows_K, options)
        head = _VocabProjection(chosen_KH, weight_VH, options)
        table_K4 = empty_table(head.logits_KV)
        options.tiles.update(table_K4, head.logits_KV[:, :0], labels_K, VocabRange(0, 0), fresh=True)
        budget = options.save_bytes if any(ctx.needs_input_grad[:2]) else 0
        # Gathered rows are kept first: the backward would have to gather them again.
        keeps_rows = options.gathers and chosen_KH.nbytes <= budget
        budget -= chosen_KH.nbytes if keeps_rows else 0
        kept: dict[int, Tensor] = {}
        for part in head.slices():
            logits_KV = head.logits_KV[:, : part.stop - part.start]
            keep = logits_KV.nbytes <= budget
            if keep:
                budget -= logits_KV.nbytes
                logits_KV = kept[part.start] = logits_KV.new_empty(logits_KV.shape)
            columns = options.columns.cut(part.start, part.stop)
            factor_VH = as_matmul_input(weight_VH[part])
            for rows in head.row_blocks():
                # Logits that are not kept are computed in the same memory again and again, which stays in cache.
                tile_KV = logits_KV[rows] if keep else logits_KV[: rows.stop - rows.start]
                matmul_into(tile_KV, head.hidden_KH[rows], factor_VH.t())
                options.tiles.update(table_K4[rows], tile_KV, labels_K[rows], columns, fresh=False)
        merged = options.tiles.merge(gather_tables(table_K4, options.group), labels_K)
        vectors = (labels_K, rows_K, merged.max_T, merged.sum_T, merged.entropy_T)
        ctx.save_for_backward(hidden_TH, weight_VH, chosen_KH if keeps_rows else None, *vectors)
        ctx.options, ctx.kept = options, kept
        ctx.main_grad = getattr(weight_VH, "main_grad", None)
        ctx.weight = weight_VH
        ctx.set_materialize_grads(False)
        if not options.tiles.options.entropy:
            ctx.mark_non_differentiable(merged.entropy_T)
        return merged.logprobs_T, merged.entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, chosen_KH, labels_K, rows_K, max_K, sum_K, entropy_K = ctx.saved_tensors
        # Kept logits become the gradient, in place. A second backward has none and recomputes everything.
        kept, ctx.kept = ctx.kept, {}
        chosen_KH = _select_rows(hidden_TH, rows_K, ctx.options) if chosen_KH is None else chosen_KH
        head = _VocabProjection(chosen_KH, weight_VH, ctx.options)
        outputs = OutputGradients(Merged(max_K, sum_K, entropy_K, entropy_K), labels_K, *grads)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_grad = _WeightGradient(head, ctx.main_grad, ctx.options.columns.count) if needs_weight else None
        hidden_grad_KH = torch.zeros_like(head.hidden_KH, dtype=head.dtype) if needs_hidden else None
        # Slices whose product for the weight is delayed: it runs while the other gradient is summed over the ranks.
        delayed: list[tuple[slice, Tensor]] = []
        slices = sorted(head.slices(), key=lambda part: part.start in kept)
        for part in slices:
            delays = ctx.options.group is not None and (part.start in kept or part is slices[-1])
            gradient_KV = head.gradient_of(part, outputs, kept.pop(part.start, None), hidden_grad_KH)
            if weight_grad is not None:
                delayed.append((part, gradient_KV)) if delays else weight_grad.take(part, gradient_KV)
        summed = None if hidden_grad_KH is None else _HiddenGradient(hidden_grad_KH, hidden_TH, rows_K, ctx.options)
        for part, gradient_KV in delayed:
            assert weight_grad is not None
            weight_grad.take(part, gradient_KV)
        grad_hidden_TH = None if summed is None else summed.wait()
        if weight_grad is not None and weight_grad.result is None:
            _mark_complete(ctx.weight)
        return grad_hidden_TH, None if weight_grad is None else weight_grad.result, None, None, None


def _mark_complete(weight_VH: Tensor) -> None:
    """Tell Megatron's overlap of gradient sums that the gradient of a weight is complete.

    Megatron waits for every parameter's `grad`, which its hook removes after autograd has finished the parameter. A
    weight whose whole gradient is in `main_grad` gets a `grad` that takes no memory. A weight that is the embedding too
    gets the embedding's gradient, last of all.
    """
    if getattr(weight_VH, "only_main_grad", False):
        weight_VH.grad = weight_VH.new_zeros(1).expand_as(weight_VH)
        weight_VH.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def logits_again_into(out_KV: Tensor, hidden_KH: Tensor, factor_HV: Tensor) -> None:
    """Recompute logits that the forward has not kept. A function of its own, so that a rehearsal can count it."""
    matmul_into(out_KV, hidden_KH, factor_HV)


class _VocabProjection:
    """The factors of the product, and memory for the logits of one slice."""

    def __init__(self, chosen_KH: Tensor, weight_VH: Tensor, options: LinearLogprobOptions) -> None:
        self.dtype = working_dtype(chosen_KH)
        self.hidden_KH = as_matmul_input(chosen_KH)
        self.weight_VH = weight_VH
        self._options = options
        num_rows = max(self.hidden_KH.size(0), 1)
        on_cpu = chosen_KH.device.type == "cpu"
        # CPU: tiles of 4 MiB at most, which stay in cache. GPU: slices of 64 MiB, which keep all multiprocessors busy.
        self._max_rows = 1024 if on_cpu else num_rows
        width = 1024 if on_cpu else max(2**24 // num_rows // 256 * 256, 256)
        self._width = min(width, max(options.columns.count, 1))
        self.logits_KV = torch.empty(self.hidden_KH.size(0), self._width, dtype=self.dtype, device=chosen_KH.device)
        self._gradient_KV: Tensor | None = None

    def slices(self) -> list[slice]:
        """Slices of this rank's columns, without padding."""
        return _slices(self._options.columns.count, self._width)

    def row_blocks(self) -> list[slice]:
        return _slices(self.hidden_KH.size(0), self._max_rows)

    def gradient_of(
        self, part: slice, outputs: OutputGradients, kept_KV: Tensor | None, hidden_grad_KH: Tensor | None
    ) -> Tensor:
        """d loss / d logits of a slice, in the dtype of the factors. Adds the slice's part to the hidden states'
        gradient `hidden_grad_KH`. `kept_KV`: logits from the forward."""
        logits_KV = self.logits_KV[:, : part.stop - part.start] if kept_KV is None else kept_KV
        gradient_KV = self._memory_for(logits_KV, kept_KV is not None)
        columns = self._options.columns.cut(part.start, part.stop)
        factor_VH = as_matmul_input(self.weight_VH[part])
        for rows in self.row_blocks():
            if kept_KV is None:
                logits_again_into(logits_KV[rows], self.hidden_KH[rows], factor_VH.t())
            self._options.tiles.gradient(gradient_KV[rows], logits_KV[rows], columns, outputs.rows(rows))
            if hidden_grad_KH is not None:
                addmm_into(hidden_grad_KH[rows], gradient_KV[rows], factor_VH)
        return gradient_KV

    def _memory_for(self, logits_KV: Tensor, kept: bool) -> Tensor:
        """Memory for the gradient of logits, in the dtype of the factors: the logits' own where that is their dtype."""
        if self.hidden_KH.dtype == self.dtype:
            return logits_KV
        if kept:
            return torch.empty_like(logits_KV, dtype=self.hidden_KH.dtype)
        if self._gradient_KV is None:
            self._gradient_KV = torch.empty_like(self.logits_KV, dtype=self.hidden_KH.dtype)
        return self._gradient_KV[:, : logits_KV.size(1)]


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _WeightGradient:
    """Gradient of the vocabulary matrix: in Megatron's `main_grad` if it exists, otherwise a new tensor `result`."""

    def __init__(self, head: _VocabProjection, main_grad_VH: Tensor | None, num_columns: int) -> None:
        self._head = head
        self._main_VH = main_grad_VH
        self.result: Tensor | None = None
        if main_grad_VH is None:
            self.result = torch.empty_like(head.weight_VH)
            self.result[num_columns:] = 0.0

    def take(self, part: slice, gradient_KV: Tensor) -> None:
        """Compute the rows of a slice, summed over all tokens in one product."""
        left_VK, right_KH = gradient_KV.t(), self._head.hidden_KH
        if self._main_VH is not None and self._main_VH.dtype == self._head.dtype:
            addmm_into(self._main_VH[part], left_VK, right_KH)
        elif self.result is not None and self.result.dtype in (self._head.dtype, left_VK.dtype):
            matmul_into(self.result[part], left_VK, right_KH)
        else:
            product_VH = torch.empty(left_VK.size(0), right_KH.size(1), dtype=self._head.dtype, device=left_VK.device)
            matmul_into(product_VH, left_VK, right_KH)
            if self.result is not None:
                self.result[part] = product_VH
            elif self._main_VH is not None:
                self._main_VH[part] += product_VH


class _HiddenGradient:
    """Gradient of the hidden states, being summed over the tensor-parallel ranks in fp32."""

    def __init__(
        self, part_KH: Tensor, hidden_TH: Tensor, rows_K: Tensor | None, options: LinearLogprobOptions
    ) -> None:
        self._hidden_TH, self._rows_K, self._options = hidden_TH, rows_K, options
        self._work: dist.Work | None = None
        self._gradient = part_KH
        if options.group is None:
            return
        if options.gathers:
            whole_TH = self._scatter_rows(part_KH, hidden_TH.size(0) * options.group.size())
            self._gradient = torch.empty(hidden_TH.shape, dtype=part_KH.dtype, device=part_KH.device)
            self._work = dist.reduce_scatter_tensor(self._gradient, whole_TH, group=options.group, async_op=True)
        else:
            self._work = dist.all_reduce(part_KH, group=options.group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the sum. Returns it in the shape and dtype of the hidden states."""
        if self._work is not None:
            self._work.wait()
        gradient = self._gradient
        if not self._options.gathers:
            gradient = self._scatter_rows(gradient, self._hidden_TH.size(0))
        return gradient.to(self._hidden_TH.dtype)

    def _scatter_rows(self, rows_KH: Tensor, num_tokens: int) -> Tensor:
        if self._rows_K is None:
            return rows_KH
        all_TH = rows_KH.new_zeros(num_tokens, rows_KH.size(1))
        if not self._options.rows_repeat:
            return all_TH.index_copy_(0, self._rows_K, rows_KH)
        return add_rows_(all_TH, self._rows_K, rows_KH)


def add_rows_(all_TH: Tensor, rows_K: Tensor, values_KH: Tensor) -> Tensor:
    """Add values to the rows `rows_K` in place. Several values for a row are added in the order of K."""
    if all_TH.device.type == "cpu":
        return all_TH.index_add_(0, rows_K, values_KH)
    return add_sorted_rows_(all_TH, rows_K, values_KH)


def add_sorted_rows_(all_TH: Tensor, rows_K: Tensor, values_KH: Tensor) -> Tensor:
    """`add_rows_` on a GPU. `index_put_` sorts rows there without waiting for the device, while the float atomics of
    `index_add_` keep no order."""
    return all_TH.index_put_((rows_K,), values_KH, accumulate=True)


def _select_rows(hidden_TH: Tensor, rows_K: Tensor | None, options: LinearLogprobOptions) -> Tensor:
    """The kept rows of all ranks' hidden states."""
    if options.group is not None and options.gathers:
        whole_TH = hidden_TH.new_empty(hidden_TH.size(0) * options.group.size(), hidden_TH.size(1))
        dist.all_gather_into_tensor(whole_TH, hidden_TH.contiguous(), group=options.group)
        hidden_TH = whole_TH
    return hidden_TH if rows_K is None else hidden_TH.index_select(0, rows_K)
