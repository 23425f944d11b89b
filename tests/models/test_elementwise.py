"""Chains of element-wise operations against the same written in plain torch, values and gradients.

Not covered: a GPU, where the same operations run.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from megarlhf.models.elementwise import SiluGate, rms_norm, rotate


def rotate_plainly(x_TND, cos_T1D, sin_T1D):
    first, second = x_TND.chunk(2, -1)
    return torch.cat([first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D], -1)


silu_gate = SiluGate(SimpleNamespace(glu_linear_offset=0, activation_func_clamp_value=None))


def silu_gate_plainly(x_TF):
    gate_TF, up_TF = x_TF.chunk(2, -1)
    return silu(gate_TF) * up_TF


def arguments(dtype):
    """Not contiguous, as slices of a fused projection are."""
    generator = torch.Generator().manual_seed(3)
    x_TND = torch.randn(7, 5, 12, generator=generator, dtype=torch.float64)[:, 1:4, 2:10].to(dtype)
    angles_T1D = torch.randn(7, 1, 4, generator=generator, dtype=torch.float64)
    return x_TND, angles_T1D.cos().to(dtype), angles_T1D.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_to_plain_torch(dtype):
    """fp64 and fp32 to the last bits; bf16, whose plain form rounds after every operation, to two of its own."""
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    x_TND, cos_T1D, sin_T1D = arguments(dtype)
    for ours, plainly, others in ((rotate, rotate_plainly, (cos_T1D, sin_T1D)), (silu_gate, silu_gate_plainly, ())):
        results = []
        for function in (ours, plainly):
            leaf = x_TND.clone().requires_grad_()
            out = function(leaf, *others)
            weights = torch.linspace(-1, 2, out.numel(), dtype=dtype).view(out.shape)
            (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
            assert out.dtype == gradient.dtype == dtype
            results.append((out, gradient))
        torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
        assert float(results[0][1].abs().min()) > 0


def test_gradients_against_differences():
    x_TND, cos_T1D, sin_T1D = arguments(torch.float64)
    leaf = x_TND.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_T1D, sin_T1D), leaf)
    assert torch.autograd.gradcheck(silu_gate, leaf)


def rms_norm_plainly(hidden_SBH, weight_H, eps):
    wide_SBH = hidden_SBH.float()
    scaled_SBH = wide_SBH * torch.rsqrt(wide_SBH.pow(2).mean(-1, keepdim=True) + eps)
    return weight_H * scaled_SBH.to(hidden_SBH.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_plain_torch_bit_for_bit(dtype):
    """Beside a residual, whose gradient comes first: three are added, and their order shows in the last bits."""
    generator = torch.Generator().manual_seed(4)
    hidden_SBH, grad_SBH = (torch.randn(33, 2, 24, generator=generator).to(dtype) for _ in range(2))
    results = []
    for norm in (rms_norm, rms_norm_plainly):
        hidden, weight_H = hidden_SBH.clone().requires_grad_(), torch.linspace(0.5, 2, 24, dtype=dtype).requires_grad_()
        entered = hidden * 1.5
        out = entered + norm(entered, weight_H, 1e-5).sin()
        results.append((out, *torch.autograd.grad(out, (hidden, weight_H), grad_SBH)))
    for ours, plainly in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, plainly)
    assert float(results[0][1].abs().max()) > 0


def test_inputs_are_left_alone():
    x_TND, cos_T1D, sin_T1D = arguments(torch.float32)
    kept = x_TND.clone()
    rotate(x_TND, cos_T1D, sin_T1D)
    silu_gate(x_TND)
    rms_norm(x_TND, torch.ones(8), 1e-5)
    assert torch.equal(x_TND, kept)
