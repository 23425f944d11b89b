"""Qwen3: Llama with norms of query and key heads and a head_dim of its own."""

from __future__ import annotations

from dataclasses import replace

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, positive
from megarlhf.architectures.entries import ATTENTION, GATED_MLP, INPUT_NORM, OUTPUT, OUTPUT_BIAS, QK_NORMS
from megarlhf.architectures.families.llama import RELATIVES_FACTS, decoder
from megarlhf.architectures.families.qwen2 import WHOLE_ATTENTION, upper_window
from megarlhf.architectures.table import Family

# vLLM's Qwen3 has no such bias, whatever attention_bias says (0.32).
QWEN3_ATTENTION = (*ATTENTION, OUTPUT, replace(OUTPUT_BIAS, vllm=None), *QK_NORMS)

FAMILY = Family(
    model_type="qwen3",
    config=ConfigSpec(
        lm_class="Qwen3ForCausalLM",
        scalar_class="Qwen3ForSequenceClassification",
        facts={
            **RELATIVES_FACTS,
            "head_dim": ConfigField(name="head_dim", read=positive, default=128),
            "mlp_bias": False,
            "qk_norm": True,
        },
        refusals=WHOLE_ATTENTION,
        window=upper_window,
    ),
    table=decoder(INPUT_NORM, *QWEN3_ATTENTION, *GATED_MLP),
)
