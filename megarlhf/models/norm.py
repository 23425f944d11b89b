"""Norms for the local layer spec.

Megatron-Core's `WrappedTorchNorm` refuses sequence parallelism. These norms mark their parameters, so that Megatron
sums their gradients over the tensor-parallel group.

Legend: S sequence (a shard of it under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarlhf.models.elementwise import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean and the quotient in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size)

    def forward(self, hidden_SBH: Tensor) -> Tensor:
        return rms_norm(hidden_SBH, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias; torch accumulates in fp32 (Ba et al., 2016)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size)
        self.bias = _parameter(config, hidden_size)

    def forward(self, hidden_SBH: Tensor) -> Tensor:
        return nn.functional.layer_norm(hidden_SBH, self.weight.shape, self.weight, self.bias, self.eps)


def _parameter(config: TransformerConfig, size: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(size, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter
