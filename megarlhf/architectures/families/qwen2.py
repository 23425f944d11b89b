"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; tied embeddings on the small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.architectures.config_spec import ConfigSpec, Facts, Refusal, flag, positive
from megarlhf.architectures.entries import ATTENTION, GATED_MLP, INPUT_NORM, OUTPUT
from megarlhf.architectures.families.llama import RELATIVES_FACTS, decoder
from megarlhf.architectures.table import Family

WHOLE_ATTENTION = (
    Refusal(
        "dual_chunk_attention_config",
        lambda value, facts: True,
        "attention in chunks is not implemented; use a model without it",
    ),
)


def window_of(config: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one. A file without the key has transformers' default."""
    if not flag("use_sliding_window", config.get("use_sliding_window") or False):
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else positive("sliding_window", window)


def upper_window(config: Mapping[str, Any], facts: Facts) -> str:
    """`ConfigSpec.window` of Qwen2 and Qwen3: layers from `max_window_layers` on have it, unless `layer_types` says
    which do."""
    window, first, count = window_of(config), config.get("max_window_layers", 28), facts["num_layers"]
    if window is None or config.get("layer_types") is not None:
        return ""
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(f"config.json has max_window_layers = {first!r}, expected a number of layers; correct it")
    keys = f"use_sliding_window, sliding_window = {window} and max_window_layers = {first}"
    return "" if first >= count else f"{keys}, so layers {first} to {count - 1} have a window"


FAMILY = Family(
    model_type="qwen2",
    config=ConfigSpec(
        lm_class="Qwen2ForCausalLM",
        scalar_class="Qwen2ForSequenceClassification",
        facts={**RELATIVES_FACTS, "qkv_bias": True, "output_bias": False, "mlp_bias": False},
        refusals=WHOLE_ATTENTION,
        window=upper_window,
    ),
    table=decoder(INPUT_NORM, *ATTENTION, OUTPUT, *GATED_MLP),
)
