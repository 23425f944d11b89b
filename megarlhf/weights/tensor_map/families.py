"""Every architecture that is known: one line each (docs/new-architecture.md)."""

from __future__ import annotations

from megarlhf.weights.tensor_map import gpt2, llama, mistral, mixtral, opt, qwen2, qwen3, qwen3_moe
from megarlhf.weights.tensor_map.table import Family

_FAMILIES = (
    llama.LLAMA,
    mistral.MISTRAL,
    qwen2.QWEN2,
    qwen3.QWEN3,
    gpt2.GPT2,
    opt.OPT,
    mixtral.MIXTRAL,
    qwen3_moe.QWEN3_MOE,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""By `model_type`."""
