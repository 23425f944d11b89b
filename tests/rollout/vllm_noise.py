"""Tokens by vLLM's sampling kernel for GPUs, on a GPU or by Triton's interpreter: run by test_slices_on_gpu.py.

It prints the token of each (seed, position), drawn in several batches: all at once, and in parts in other slots.
"""

import json

import torch
import triton
import vllm.triton_utils

if not vllm.triton_utils.HAS_TRITON:  # vLLM has no Triton on a CPU, where its interpreter is enough here
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language

from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS, POSITIONS, VOCABULARY = (5, 2**61 + 7, 11), range(40, 52), 1500


def draw(rows: list[tuple[int, int]], logits: torch.Tensor, slots: dict[int, int]) -> list[int]:
    """Tokens of (seed, position) rows in one batch; `slots` are the places of requests in vLLM's state."""
    seeds = torch.zeros(8, dtype=torch.int64)
    for seed, slot in slots.items():
        seeds[slot] = seed
    places = torch.tensor([slots[seed] for seed, _ in rows], dtype=torch.int32)
    positions = torch.tensor([position for _, position in rows], dtype=torch.int64)
    sampled = gumbel_sample(
        logits.to(DEVICE), places.to(DEVICE), torch.ones(8, device=DEVICE), seeds.to(DEVICE), positions.to(DEVICE),
        apply_temperature=False, is_drafting=False,
    )  # fmt: skip
    return [int(token) for token in sampled]


rows = [(seed, position) for seed in SEEDS for position in POSITIONS]
logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(0))
whole = draw(rows, logits, {5: 0, SEEDS[1]: 1, 11: 2})
parts: list[int] = []
for start in range(0, len(rows), 5):  # as when a response goes on in another round, beside other requests
    parts += draw(rows[start : start + 5], logits[start : start + 5], {11: 1, 5: 7, SEEDS[1]: 3})
other = draw([(seed + 1, position) for seed, position in rows], logits, {6: 0, SEEDS[1] + 1: 1, 12: 2})
later = draw([(seed, position + 1) for seed, position in rows], logits, {5: 0, SEEDS[1]: 1, 11: 2})
print(json.dumps({"whole": whole, "parts": parts, "other": other, "later": later}))
