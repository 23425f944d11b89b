"""The filters of our own engine against those of vLLM's sampler, on random logits: which tokens are kept.

Not covered: their place in a request (tests/distributed/test_sampling_options.py).
"""

import pytest
import torch

from megarlhf.algo.sampling import filtered_logits

B, V = 16, 50


def vllms(logits_BV, top_p=1.0, top_k=0, min_p=0.0):
    """In the order of vLLM's sampler: its logits processor of min_p, then top_k and top_p together."""
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor  # here: every worker imports all files
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits_BV = logits_BV.clone()
    if min_p > 0:
        processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        processor.min_p_count, processor.min_p = B, torch.full((B, 1), min_p)
        logits_BV = processor.apply(logits_BV)
    k_B = torch.full((B,), top_k) if top_k else None
    p_B = torch.full((B,), top_p) if top_p < 1 else None
    return apply_top_k_top_p(logits_BV, k_B, p_B)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"min_p": 0.5},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 10, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_the_same_tokens_are_kept_as_by_vllm(options):
    kept = 0
    for seed in range(20):
        logits_BV = 2 * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))
        found_BV, theirs_BV = filtered_logits(logits_BV, **options), vllms(logits_BV, **options)
        assert torch.equal(found_BV.isfinite(), theirs_BV.isfinite())
        kept += int(found_BV.isfinite().sum())
    assert 20 * B < kept < 20 * B * V, "more than one token of a row, and fewer than all"
