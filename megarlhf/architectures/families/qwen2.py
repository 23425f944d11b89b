"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; tied embeddings on the small sizes."""

from __future__ import annotations

from megarlhf.architectures.config_spec import ConfigSpec, Refusal, only
from megarlhf.architectures.entries import ATTENTION, GATED_MLP, INPUT_NORM, OUTPUT
from megarlhf.architectures.families.llama import RELATIVES_FACTS, decoder
from megarlhf.architectures.table import Family

WHOLE_ATTENTION = (
    only("use_sliding_window", False, "a window on the upper layers only is not implemented; use a model without one"),
    Refusal(
        "layer_types",
        lambda value, facts: set(value) != {"full_attention"},
        "only layers of full_attention are implemented; use a model of these",
    ),
    Refusal(
        "dual_chunk_attention_config",
        lambda value, facts: True,
        "attention in chunks is not implemented; use a model without it",
    ),
)
"""Ways in which a Qwen attends to less than all; `sliding_window` alone says nothing there."""

FAMILY = Family(
    model_type="qwen2",
    config=ConfigSpec(
        lm_class="Qwen2ForCausalLM",
        scalar_class="Qwen2ForSequenceClassification",
        facts={**RELATIVES_FACTS, "qkv_bias": True, "output_bias": False, "mlp_bias": False},
        refusals=WHOLE_ATTENTION,
    ),
    table=decoder(INPUT_NORM, *ATTENTION, OUTPUT, *GATED_MLP),
)
