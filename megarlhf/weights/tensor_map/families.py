"""Every architecture that is known: one line each (docs/new-architecture.md)."""

from __future__ import annotations

from megarlhf.weights.tensor_map.llama import LLAMA
from megarlhf.weights.tensor_map.mistral import MISTRAL
from megarlhf.weights.tensor_map.qwen2 import QWEN2
from megarlhf.weights.tensor_map.qwen3 import QWEN3
from megarlhf.weights.tensor_map.table import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
    )
}
"""By `model_type`."""
