"""Passes over a tile of logits as Triton kernels: one program walks a row once, with one exponential per element.

Logits are bf16, fp16 or fp32 and are converted to fp32 first (Triton's interpreter gets bf16 arithmetic wrong, and
truncates where a GPU rounds to bf16). A plain forward is two launches, `update` and `merge`; a backward is one.

Legend: T rows, V columns, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarlhf.kernels.backends import on_device
from megarlhf.kernels.statistics import LOG_ZERO, Merged, VocabRange
from megarlhf.kernels.tiles import LogprobOptions, OutputGradients

_LOG_ZERO = tl.constexpr(LOG_ZERO)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""The maximum of no columns: see `empty_table`."""
_MERGED = 256
"""Tokens that a program merges."""


@dataclass(frozen=True)
class Block:
    """Division of a kernel's work."""

    columns: int
    """Columns of a step, a power of two."""
    warps: int

    def fitted(self, num_columns: int) -> Block:
        """The block for a shorter row: not more columns than the row has, and at least eight columns per thread."""
        columns = min(max(triton.next_power_of_2(num_columns), 256), self.columns)
        return Block(columns, max(min(self.warps, columns // 256), 1))


FORWARD = Block(columns=2048, warps=4)
BACKWARD = Block(columns=4096, warps=4)
"""FORWARD and BACKWARD were the fastest in `benchmarks.gpu_logprob --sweep` on an H200:
benchmarks/results/gpu_sweep.json."""


# debug compiles the assertion in. Launches say sanitize_overflow=False, or it would bring one with each integer sum.
@triton.jit(debug=True, do_not_specialize=["label_stride", "first", "vocab", "ignore_index"])
def _statistics_kernel(
    logits_ptr, labels_ptr, table_ptr,
    stride, label_stride, first, num_columns, vocab, ignore_index, scale,
    FRESH: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Tiles.update` for one row."""
    row = tl.program_id(0).to(tl.int64)
    start_ptr = logits_ptr + row * stride
    table_ptr += row * 4
    label = tl.load(labels_ptr + row * label_stride)
    kept = label != ignore_index
    m = tl.full([], _LOWEST, tl.float32)
    if FRESH:
        in_vocabulary = (label >= 0) & (label < vocab)
        tl.device_assert((label == ignore_index) | in_vocabulary, "label outside the vocabulary, and not ignore_index")
    else:
        m = tl.load(table_ptr)
    old_m = m
    # The sums stay as wide as a block until the end: a step reduces once, for the maximum.
    s = tl.zeros([BLOCK], tl.float32)
    a = tl.zeros([BLOCK], tl.float32)
    offsets = tl.arange(0, BLOCK)
    stop = tl.where(kept, num_columns, 0)  # an ignored row is not read
    for left in range(0, stop, BLOCK):
        inside = left + offsets < num_columns
        z = tl.load(start_ptr + left + offsets, mask=inside, other=-float("inf")).to(tl.float32) * scale
        new_m = tl.maximum(m, tl.max(z, 0))
        d = z - new_m
        e = tl.exp(d)
        # Rescale the sums so far to the new maximum.
        moved = tl.maximum(m - new_m, _LOG_ZERO)
        rescale = tl.exp(moved)
        if ENTROPY:
            a = (a + s * moved) * rescale + e * tl.maximum(d, _LOG_ZERO)
        s = s * rescale + e
        m = new_m
    total_s = tl.sum(s, 0)
    total_a = tl.sum(a, 0)
    z_label = tl.full([], 0.0, tl.float32)
    if not FRESH:
        old_s = tl.load(table_ptr + 1)
        moved = tl.maximum(old_m - m, _LOG_ZERO)
        total_s += old_s * tl.exp(moved)
        if ENTROPY:
            total_a += (tl.load(table_ptr + 2) + old_s * moved) * tl.exp(moved)
        z_label = tl.load(table_ptr + 3)
    local = label - first
    if kept & (local >= 0) & (local < num_columns):
        z_label += tl.load(start_ptr + local).to(tl.float32) * scale
    tl.store(table_ptr, m)
    tl.store(table_ptr + 1, total_s)
    tl.store(table_ptr + 2, total_a)
    tl.store(table_ptr + 3, z_label)


@triton.jit(do_not_specialize=["num_tokens", "label_stride", "ignore_index"])
def _merge_kernel(
    tables_ptr, labels_ptr, max_ptr, sum_ptr, entropy_ptr, logprob_ptr,
    num_tokens, num_ranks, label_stride, ignore_index,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Tiles.merge` for some tokens: `statistics.merge`, rank after rank."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    tables_ptr += token * 4
    label = tl.load(labels_ptr + token * label_stride, mask=inside, other=ignore_index)
    kept = inside & (label != ignore_index)
    m = tl.full([BLOCK], _LOWEST, tl.float32)
    for rank in range(num_ranks):
        m = tl.maximum(m, tl.load(tables_ptr + rank * num_tokens * 4, mask=kept, other=_LOWEST))
    s = tl.zeros([BLOCK], tl.float32)
    a = tl.zeros([BLOCK], tl.float32)
    z_label = tl.zeros([BLOCK], tl.float32)
    for rank in range(num_ranks):
        rank_ptr = tables_ptr + rank * num_tokens * 4
        rank_s = tl.load(rank_ptr + 1, mask=kept, other=0.0)
        # e^(m_r - m) is 0 for a rank without a finite column; its sums are 0 too.
        moved = tl.maximum(tl.load(rank_ptr, mask=kept, other=_LOWEST) - m, _LOG_ZERO)
        rescale = tl.exp(moved)
        if ENTROPY:
            a += (tl.load(rank_ptr + 2, mask=kept, other=0.0) + rank_s * moved) * rescale
        s += rank_s * rescale
        z_label += tl.load(rank_ptr + 3, mask=kept, other=0.0)
    s = tl.where(kept, s, 1.0)
    log_s = tl.log(s)
    tl.store(max_ptr + token, m, mask=inside)
    tl.store(sum_ptr + token, s, mask=inside)
    tl.store(entropy_ptr + token, tl.where(kept, log_s - a / s, 0.0) if ENTROPY else a, mask=inside)
    # Not lse - z, which has three digits left under a common offset of 1e4.
    tl.store(logprob_ptr + token, tl.where(kept, (z_label - m) - log_s, 0.0), mask=inside)


@triton.jit(do_not_specialize=["label_stride", "by_logprob_stride", "by_entropy_stride", "first", "ignore_index"])
def _gradient_kernel(
    out_ptr, logits_ptr, labels_ptr, max_ptr, sum_ptr, entropy_ptr, by_logprob_ptr, by_entropy_ptr,
    out_stride, stride, label_stride, by_logprob_stride, by_entropy_stride,
    first, num_columns, width, ignore_index, scale,
    BY_LOGPROB: tl.constexpr, BY_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Tiles.gradient` for a block of one row. Reads the block before writing it, since `out` may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out_ptrs = out_ptr + row * out_stride + offsets
    label = tl.load(labels_ptr + row * label_stride)
    by = tl.full([], 0.0, tl.float32)
    by_h = tl.full([], 0.0, tl.float32)
    if BY_LOGPROB:
        by = tl.load(by_logprob_ptr + row * by_logprob_stride) * scale
    if BY_ENTROPY:
        by_h = tl.load(by_entropy_ptr + row * by_entropy_stride) * scale
    gradient = tl.zeros([BLOCK], tl.float32)
    if (label != ignore_index) & ((by != 0.0) | (by_h != 0.0)):
        inside = offsets < num_columns
        z = tl.load(logits_ptr + row * stride + offsets, mask=inside, other=-float("inf")).to(tl.float32) * scale
        s = tl.load(sum_ptr + row)
        d = z - tl.load(max_ptr + row)
        p = tl.exp(d) / s
        gradient -= p * by
        if BY_ENTROPY:
            gradient -= p * (by_h * (tl.maximum(d, _LOG_ZERO) + (tl.load(entropy_ptr + row) - tl.log(s))))
        gradient = tl.where(inside & (offsets == label - first), gradient + by, gradient)
    tl.store(out_ptrs, gradient.to(out_ptr.dtype.element_ty), mask=offsets < width)


class TritonTiles:
    """`tiles.Tiles` on a GPU, and on a CPU where TRITON_INTERPRET was set before Triton was imported."""

    def __init__(self, options: LogprobOptions, forward: Block = FORWARD, backward: Block = BACKWARD) -> None:
        self.options, self._forward, self._backward = options, forward, backward

    def update(
        self, table_T4: Tensor, logits_TV: Tensor, labels_T: Tensor, columns: VocabRange, *, fresh: bool
    ) -> None:
        """See `Tiles.update`. The fresh update also checks labels by a device assertion."""
        logits_TV, options = _with_rows(logits_TV), self.options
        assert table_T4.is_contiguous()
        assert table_T4.dtype == torch.float32
        if logits_TV.size(0) == 0 or (columns.count == 0 and not fresh):
            return
        block = self._forward.fitted(columns.count)
        with on_device(logits_TV.device):
            _statistics_kernel[(logits_TV.size(0),)](
                logits_TV, labels_T, table_T4,
                logits_TV.stride(0), labels_T.stride(0), columns.first, columns.count,
                options.vocab, options.ignore_index, options.scale,
                FRESH=fresh, ENTROPY=options.entropy, BLOCK=block.columns, num_warps=block.warps,
                sanitize_overflow=False,
            )  # fmt: skip

    def merge(self, tables_RT4: Tensor, labels_T: Tensor) -> Merged:
        """See `Tiles.merge`."""
        num_ranks, num_tokens, _ = tables_RT4.shape
        assert tables_RT4.is_contiguous()
        assert tables_RT4.dtype == torch.float32
        merged = Merged(*(tables_RT4.new_empty(num_tokens) for _ in range(4)))
        if num_tokens:
            with on_device(tables_RT4.device):
                _merge_kernel[(triton.cdiv(num_tokens, _MERGED),)](
                    tables_RT4, labels_T, *merged,
                    num_tokens, num_ranks, labels_T.stride(0), self.options.ignore_index,
                    ENTROPY=self.options.entropy, BLOCK=_MERGED, num_warps=_MERGED // 64,
                )  # fmt: skip
        return merged

    def gradient(self, out_TV: Tensor, logits_TV: Tensor, columns: VocabRange, outputs: OutputGradients) -> None:
        """See `Tiles.gradient`. A row whose gradient is 0 is written without being read."""
        num_rows, width = logits_TV.shape
        if num_rows == 0 or width == 0:
            return
        logits_TV = _with_rows(logits_TV)
        if out_TV.stride(1) != 1:
            rows_TV = torch.empty(out_TV.shape, dtype=out_TV.dtype, device=out_TV.device)
            self.gradient(rows_TV, logits_TV, columns, outputs)
            out_TV.copy_(rows_TV)
            return
        merged, labels_T = outputs.merged, outputs.labels_T
        by_T = merged.max_T if outputs.grad_logprobs_T is None else outputs.grad_logprobs_T
        by_h_T = merged.max_T if outputs.grad_entropy_T is None else outputs.grad_entropy_T
        block = self._backward.fitted(width)
        with on_device(logits_TV.device):
            _gradient_kernel[(num_rows, triton.cdiv(width, block.columns))](
                out_TV, logits_TV, labels_T, merged.max_T, merged.sum_T, merged.entropy_T, by_T, by_h_T,
                out_TV.stride(0), logits_TV.stride(0), labels_T.stride(0), by_T.stride(0), by_h_T.stride(0),
                columns.first, columns.count, width, self.options.ignore_index, self.options.scale,
                BY_LOGPROB=outputs.grad_logprobs_T is not None, BY_ENTROPY=outputs.grad_entropy_T is not None,
                BLOCK=block.columns, num_warps=block.warps,
            )  # fmt: skip


def _with_rows(logits_TV: Tensor) -> Tensor:
    """The logits with contiguous rows; a copy only where they are not."""
    return logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
