"""Weight gradients in bf16: what the local spec rounds, and what TransformerEngine's layers add by themselves.

Not covered: TransformerEngine itself, which needs a GPU; a stand-in keeps to its protocol.
"""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_sft_layouts import config
from tests.ranks import RankPool


def test_fused_weight_gradients_are_sums_in_fp32_counted_once(
    ranks: RankPool, models: dict[str, Path], data: dict[str, Path]
) -> None:
    """Four micro-batches. Fused, `main_grad` is their sum in fp32 and what autograd got is not added; otherwise each is
    rounded to bf16 first, an error of up to half a step of 1 / 128."""
    cfg = config(models["plain"], data["sft"], {})
    cfg["actor"]["model"]["dtype"] = "bf16"
    fused = ranks.run(1, "fused_gradients", cfg, True)[0]
    rounded = ranks.run(1, "fused_gradients", cfg, False)[0]
    by_apex = ranks.run(1, "apex_gradients", cfg)[0]
    assert len(fused) == len(rounded) == len(by_apex) == 16, "four linear layers in each of four"
    for largest, error in (*fused, *by_apex):
        assert error <= 1e-6 * largest
    for largest, error in rounded:
        assert 1e-5 * largest < error < largest / 64
