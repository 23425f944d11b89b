"""Matrix products whose sums and results are fp32 (fp64 for fp64), whatever their factors are.

A GPU multiplies bf16 into fp32 directly. Elsewhere bf16 becomes fp32 before: exact, for products of two bf16 numbers
fit fp32. So does fp16, on GPUs too: gradients of logits are far below its smallest numbers. Adding a bf16 product to
an fp32 sum (`addmm` with `out_dtype`) needs torch 2.11.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_matmul_input(values: Tensor) -> Tensor:
    """In the dtype in which these are multiplied; themselves where that is theirs."""
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
