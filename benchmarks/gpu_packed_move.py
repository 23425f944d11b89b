"""Rows out of padding and back by a Triton kernel, to see whether it beats an index. Nothing else uses it.

Legend: T tokens of all sequences end to end, N sequences, R the longest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _move_kernel(out_ptr, x_ptr, cu_ptr, width, PACK: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one sequence; unpacking also writes the zeros behind it."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(cu_ptr + n), tl.load(cu_ptr + n + 1)
    inside = at < end - start
    if PACK:
        tl.store(out_ptr + start + at, tl.load(x_ptr + n * width + at, mask=inside), mask=inside)
    else:
        tl.store(out_ptr + n * width + at, tl.load(x_ptr + start + at, mask=inside, other=0.0), mask=at < width)


def pack_rows(padded_NR: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[N, R] -> [T]."""
    number, width = padded_NR.shape
    packed_T = padded_NR.new_empty(num_tokens)
    grid = (number, triton.cdiv(width, _BLOCK))
    _move_kernel[grid](packed_T, padded_NR, cu_seqlens, width, PACK=True, BLOCK=_BLOCK)
    return packed_T


def unpack_rows(packed_T: Tensor, cu_seqlens: Tensor, width: int) -> Tensor:
    """[T] -> [N, R], zeros behind each row."""
    number = len(cu_seqlens) - 1
    padded_NR = torch.empty(number, width, dtype=packed_T.dtype, device=packed_T.device)
    grid = (number, triton.cdiv(width, _BLOCK))
    _move_kernel[grid](padded_NR, packed_T, cu_seqlens, width, PACK=False, BLOCK=_BLOCK)
    return padded_NR
