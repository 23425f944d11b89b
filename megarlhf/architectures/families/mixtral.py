"""Mixtral: Mistral with experts in every layer, the chosen ones weighted to add up to 1."""

from __future__ import annotations

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, number, positive
from megarlhf.architectures.entries import ATTENTION, INPUT_NORM, OUTPUT
from megarlhf.architectures.families.llama import NO_BIASES, RELATIVES_FACTS, decoder
from megarlhf.architectures.moe import experts
from megarlhf.architectures.table import Family

FAMILY = Family(
    model_type="mixtral",
    config=ConfigSpec(
        lm_class="MixtralForCausalLM",
        scalar_class="MixtralForSequenceClassification",
        facts={
            **RELATIVES_FACTS,
            "norm_eps": ConfigField(name="rms_norm_eps", read=number, default=1e-5),
            **NO_BIASES,
            "sliding_window": ConfigField(name="sliding_window", read=positive, default=None),
            "num_experts": ConfigField(name="num_local_experts", read=positive),
            "experts_per_token": ConfigField(name="num_experts_per_tok", read=positive, default=2),
            "expert_ffn_size": lambda facts: facts["ffn_size"],
            "renormalize_experts": True,
        },
        rope_theta=1000000.0,
    ),
    table=decoder(INPUT_NORM, *ATTENTION, OUTPUT, *experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
)
