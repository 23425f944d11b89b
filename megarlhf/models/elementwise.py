"""Chains of element-wise operations of the local layer spec as single steps, their backward written out.

Written as plain torch each of these passes over its tensors six to eight times, and keeps what lies between for the
backward; on a CPU such passes wait for memory.

Legend: T tokens, N heads, D head dimension, F width of an MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary positions: turn the pair (x_i, x_{i + D/2}) of every head by the token's i-th angle.

    Shapes:  x_TND [T, N, D], cos_T1D and sin_T1D [T, 1, D / 2] in x's dtype -> [T, N, D]
    Source:  Su et al. 2021, in the order of pairs of GPT-NeoX, as Hugging Face and Megatron-Core have it
    """
    return _Rotate.apply(x_TND, cos_T1D, sin_T1D)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _rotated(x_TND, cos_T1D, sin_T1D, 1)

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor, None, None]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _rotated(grad_TND, cos_T1D, sin_T1D, -1), None, None


def _rotated(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, sign: int) -> Tensor:
    found_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    first, second = x_TND.chunk(2, -1)
    for half, itself, other, direction in zip(
        found_TND.chunk(2, -1), (first, second), (second, first), (-sign, sign), strict=True
    ):
        torch.mul(itself, cos_T1D, out=half)
        half.addcmul_(other, sin_T1D, value=direction)
    return found_TND


class SiluGate(nn.Module):
    """The activation of Megatron-Core's MLP: silu(gate) x up. Its own also adds an offset of 0 to one half.

    Source:  Shazeer 2020, SwiGLU
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.glu_linear_offset == 0, "SiluGate adds no offset"
        assert config.activation_func_clamp_value is None, "SiluGate clamps nothing"

    def forward(self, x_TF: Tensor) -> Tensor:
        """[..., 2 F] -> [..., F], where the last axis of x is [gate, up]."""
        return _SiluGate.apply(x_TF)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor) -> Tensor:
        ctx.save_for_backward(x_TF)
        gate_TF, up_TF = x_TF.chunk(2, -1)
        return torch.nn.functional.silu(gate_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (x_TF,) = ctx.saved_tensors
        gate_TF, up_TF = x_TF.chunk(2, -1)
        found_TF = torch.empty_like(x_TF)
        to_gate_TF, to_up_TF = found_TF.chunk(2, -1)
        torch.mul(grad_TF, torch.nn.functional.silu(gate_TF), out=to_up_TF)
        torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=to_gate_TF)
        return found_TF
