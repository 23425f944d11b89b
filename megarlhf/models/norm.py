"""RMSNorm for the local layer spec.

Megatron-Core's `WrappedTorchNorm` refuses sequence parallelism; this one marks its weight, so that
Megatron sums the weight's gradient over the tensor-parallel group.

Legend: S sequence (a shard of it under sequence parallelism), B batch, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean and the quotient in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_SBH: Tensor) -> Tensor:
        wide = hidden_SBH.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden_SBH.dtype)
