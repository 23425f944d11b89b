"""The router of a mixture of experts.

Legend: S sequence (a shard of it under sequence parallelism), B batch, H hidden, E experts.
"""

from __future__ import annotations

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


class Router(TopKRouter):
    """Megatron-Core's choice of experts on logits in fp32.

    Its own `gating` is a hand-written function around transformer-engine's matrix product, and fails where that is
    not installed (0.16.1 leaves the name `te_general_gemm` undefined).
    """

    def gating(self, hidden_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, E] fp32."""
        return nn.functional.linear(hidden_SBH.float(), self.weight.float())
