"""Mistral: Llama without biases, with an optional sliding window."""

from __future__ import annotations

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, positive
from megarlhf.architectures.entries import ATTENTION, GATED_MLP, INPUT_NORM, OUTPUT
from megarlhf.architectures.families.llama import NO_BIASES, RELATIVES_FACTS, decoder
from megarlhf.architectures.table import Family

FAMILY = Family(
    model_type="mistral",
    config=ConfigSpec(
        lm_class="MistralForCausalLM",
        scalar_class="MistralForSequenceClassification",
        facts={
            **RELATIVES_FACTS,
            **NO_BIASES,
            # 4096 is transformers' default for files that lack the key; null says that there is no window.
            "sliding_window": ConfigField(name="sliding_window", read=positive, default=4096, null_is_none=True),
        },
    ),
    table=decoder(INPUT_NORM, *ATTENTION, OUTPUT, *GATED_MLP),
)
