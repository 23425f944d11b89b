"""Matrix products with fp32 sums and results (fp64 for fp64), whatever the dtype of their factors.

A GPU multiplies bf16 into fp32 directly. Elsewhere bf16 is converted to fp32 first, which is exact: products of two
bf16 numbers fit fp32. fp16 is converted on GPUs too, since gradients of logits are far below its smallest numbers.
Adding a bf16 product to an fp32 sum (`addmm` with `out_dtype`) needs torch 2.11.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_matmul_input(values: Tensor) -> Tensor:
    """Convert to the dtype in which the values are multiplied; no copy where they have it."""
    if values.dtype in (torch.float32, torch.float64) or (
        values.dtype == torch.bfloat16 and values.device.type != "cpu"
    ):
        return values
    return values.float()


def matmul_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def addmm_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
