"""Element-wise functions of the local layer spec as single steps, with a backward written by hand.

In plain torch each of them would pass over its tensors six to eight times and keep the intermediate results for the
backward. On a CPU such passes wait for memory.

Legend: T tokens, N heads, D head dimension, F width of an MLP; S sequence, B batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Apply rotary positions: turn the pair (x_i, x_{i + R/2}) of every head by the token's i-th angle. R is the number
    of channels that are turned: all, or the first ones of a head.

    Shapes:  x_TND [T, N, D], cos_T1D and sin_T1D [T, 1, R / 2] in x's dtype -> [T, N, D]
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
    out_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    turned_TND, to_turn_TND, size = out_TND, x_TND, 2 * cos_T1D.size(-1)
    if size < x_TND.size(-1):
        out_TND[..., size:] = x_TND[..., size:]
        turned_TND, to_turn_TND = out_TND[..., :size], x_TND[..., :size]
    first, second = to_turn_TND.chunk(2, -1)
    for half, itself, other, direction in zip(
        turned_TND.chunk(2, -1), (first, second), (second, first), (-sign, sign), strict=True
    ):
        torch.mul(itself, cos_T1D, out=half)
        half.addcmul_(other, sin_T1D, value=direction)
    return out_TND


def rms_norm(hidden_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, with mean and quotient in fp32.

    Values and gradients equal those of plain torch bit for bit; its backward takes three times as long.
    Source:  Zhang and Sennrich 2019, equation 4
    """
    return _RMSNorm.apply(hidden_SBH, hidden_SBH, weight_H, eps)


class _RMSNorm(torch.autograd.Function):
    """Takes the hidden states twice: as the factor of the product, and as the input of the mean. In fp32 plain torch
    adds these two gradients to the residual's one after the other."""

    @staticmethod
    def forward(ctx: Any, hidden_SBH: Tensor, again_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide_SBH = hidden_SBH.float()
        factor_SB1 = torch.rsqrt(wide_SBH.pow(2).mean(-1, keepdim=True) + eps)
        scaled_SBH = (wide_SBH * factor_SB1).to(hidden_SBH.dtype)
        ctx.save_for_backward(hidden_SBH, weight_H, factor_SB1, scaled_SBH)
        return weight_H * scaled_SBH

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        hidden_SBH, weight_H, factor_SB1, scaled_SBH = ctx.saved_tensors
        wide_SBH, weight_grad_SBH = hidden_SBH.float(), grad_SBH * scaled_SBH
        weight_grad_H = weight_grad_SBH.sum(tuple(range(grad_SBH.ndim - 1)))
        through_product_SBH = (grad_SBH * weight_H).float()
        # The gradient through the mean reuses memory where its dtype allows.
        reusable = weight_grad_SBH.dtype == through_product_SBH.dtype
        through_mean_SBH = weight_grad_SBH if reusable else torch.empty_like(through_product_SBH)
        factor_grad_SB1 = torch.mul(through_product_SBH, wide_SBH, out=through_mean_SBH).sum(-1, keepdim=True)
        # Derivative of the mean of squares by each element. The order of these products is autograd's.
        mean_grad_SB1 = -0.5 * factor_grad_SB1 * factor_SB1.pow(3) / hidden_SBH.size(-1) * 2
        through_product_SBH.mul_(factor_SB1)
        torch.mul(wide_SBH, mean_grad_SB1, out=through_mean_SBH)
        if hidden_SBH.dtype == through_product_SBH.dtype:
            return through_product_SBH, through_mean_SBH, weight_grad_H, None
        # Not addcmul, which rounds once where autograd rounds twice.
        return through_product_SBH.add_(through_mean_SBH).to(hidden_SBH.dtype), None, weight_grad_H, None


class SiluGate(nn.Module):
    """Activation of a gated MLP: silu(gate) x up. Megatron-Core's own also adds an offset of 0 to one half.

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
        input_grad_TF = torch.empty_like(x_TF)
        gate_grad_TF, up_grad_TF = input_grad_TF.chunk(2, -1)
        torch.mul(grad_TF, torch.nn.functional.silu(gate_TF), out=up_grad_TF)
        torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=gate_grad_TF)
        return input_grad_TF
