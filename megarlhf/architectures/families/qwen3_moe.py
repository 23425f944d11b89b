"""Qwen3-MoE: Qwen3's attention, experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, Facts, Refusal, flag, positive
from megarlhf.architectures.entries import INPUT_NORM
from megarlhf.architectures.families.llama import RELATIVES_FACTS, decoder
from megarlhf.architectures.families.qwen2 import WHOLE_ATTENTION, window_of
from megarlhf.architectures.families.qwen3 import QWEN3_ATTENTION
from megarlhf.architectures.moe import experts
from megarlhf.architectures.table import Family

_ALIKE = (
    Refusal(
        "mlp_only_layers",
        lambda value, facts: bool(value),
        "every layer has experts here; use a model without dense layers",
    ),
    Refusal(
        "decoder_sparse_step",
        lambda value, facts: value != 1,
        "every layer has experts here; use a model with decoder_sparse_step 1",
    ),
    Refusal(
        "shared_expert_intermediate_size",
        lambda value, facts: bool(value),
        "there are no shared experts here; use a model without them",
    ),
)


def _window(config: Mapping[str, Any], facts: Facts) -> str:
    window = window_of(config)
    return "" if window is None else f"use_sliding_window and sliding_window = {window}, a window on all layers"


FAMILY = Family(
    model_type="qwen3_moe",
    config=ConfigSpec(
        lm_class="Qwen3MoeForCausalLM",
        scalar_class="Qwen3MoeForSequenceClassification",
        facts={
            **RELATIVES_FACTS,
            "mlp_bias": False,
            "qk_norm": True,
            "num_experts": ConfigField(name="num_experts", read=positive, alias="num_local_experts"),
            "experts_per_token": ConfigField(name="num_experts_per_tok", read=positive, default=8),
            "expert_ffn_size": ConfigField(name="moe_intermediate_size", read=positive),
            "renormalize_experts": ConfigField(name="norm_topk_prob", read=flag, default=False),
        },
        refusals=(*WHOLE_ATTENTION, *_ALIKE),
        window=_window,
    ),
    table=decoder(INPUT_NORM, *QWEN3_ATTENTION, *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
)
