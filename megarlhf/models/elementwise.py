"""Chains of element-wise operations of the local layer spec as single steps, their backward written out.

Written as plain torch each of these passes over its tensors six to eight times, and keeps what lies between for the
backward; on a CPU such passes wait for memory.

Legend: T tokens, N heads, D head dimension, F width of an MLP; S sequence, B batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary positions: turn the pair (x_i, x_{i + R/2}) of every head by the token's i-th angle, R being the
    channels that are turned: all, or the first ones of a head.

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
    found_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    turned_TND, to_turn_TND, size = found_TND, x_TND, 2 * cos_T1D.size(-1)
    if size < x_TND.size(-1):
        found_TND[..., size:] = x_TND[..., size:]
        turned_TND, to_turn_TND = found_TND[..., :size], x_TND[..., :size]
    first, second = to_turn_TND.chunk(2, -1)
    for half, itself, other, direction in zip(
        turned_TND.chunk(2, -1), (first, second), (second, first), (-sign, sign), strict=True
    ):
        torch.mul(itself, cos_T1D, out=half)
        half.addcmul_(other, sin_T1D, value=direction)
    return found_TND


def rms_norm(hidden_SBH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean and the quotient in fp32.

    Values and gradients are those of the same in plain torch, bit for bit, whose backward takes three times as long.
    Source:  Zhang and Sennrich 2019, equation 4
    """
    return _RMSNorm.apply(hidden_SBH, hidden_SBH, weight_H, eps)


class _RMSNorm(torch.autograd.Function):
    """Takes the hidden states twice, as factor and as what the factor is made of: in fp32 plain torch adds the two
    gradients to the residual's one after the other."""

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
        wide_SBH, of_weight_SBH = hidden_SBH.float(), grad_SBH * scaled_SBH
        grad_H = of_weight_SBH.sum(tuple(range(grad_SBH.ndim - 1)))
        found_SBH = (grad_SBH * weight_H).float()
        other_SBH = of_weight_SBH if of_weight_SBH.dtype == found_SBH.dtype else torch.empty_like(found_SBH)
        of_factor_SB1 = torch.mul(found_SBH, wide_SBH, out=other_SBH).sum(-1, keepdim=True)
        # Of the squares' mean, by each of them: the order of these products is autograd's.
        of_mean_SB1 = -0.5 * of_factor_SB1 * factor_SB1.pow(3) / hidden_SBH.size(-1) * 2
        found_SBH.mul_(factor_SB1)
        torch.mul(wide_SBH, of_mean_SB1, out=other_SBH)
        if hidden_SBH.dtype == found_SBH.dtype:
            return found_SBH, other_SBH, grad_H, None
        # Not addcmul, which rounds once where autograd rounds twice.
        return found_SBH.add_(other_SBH).to(hidden_SBH.dtype), None, grad_H, None


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
