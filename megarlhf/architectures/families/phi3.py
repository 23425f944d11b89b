"""Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, and on some a partial rotary embedding
or LongRoPE."""

from __future__ import annotations

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, number, only, positive
from megarlhf.architectures.entries import INPUT_NORM, OUTPUT, PRE_MLP_NORM, entry
from megarlhf.architectures.families.llama import FACTS, NO_BIASES, decoder
from megarlhf.architectures.rules import qkv_by_group, qkv_by_kind, split_columns, split_halves
from megarlhf.architectures.table import Entry, Family, Place

_QKV = Entry(
    tensors=(("self_attn.qkv_proj.weight", ("qkv", "hidden")),),
    init="normal",
    megatron=Place("self_attention.linear_qkv.weight", qkv_by_group),
    vllm=Place("self_attn.qkv_proj.weight", qkv_by_kind),
)

_MLP = (
    PRE_MLP_NORM,
    entry("mlp.gate_up_proj.weight", ("gate_up", "hidden"), "normal", "mlp.linear_fc1.weight", split_halves),
    entry("mlp.down_proj.weight", ("hidden", "ffn"), "residual", "mlp.linear_fc2.weight", split_columns),
)

FAMILY = Family(
    model_type="phi3",
    config=ConfigSpec(
        lm_class="Phi3ForCausalLM",
        scalar_class="Phi3ForSequenceClassification",
        facts={
            **FACTS,
            "norm_eps": ConfigField(name="rms_norm_eps", read=number, default=1e-5),
            **NO_BIASES,
            "sliding_window": ConfigField(name="sliding_window", read=positive, default=None),
            "rotary_share": ConfigField(name="partial_rotary_factor", read=number, default=1.0),
        },
        # transformers refuses all others here, and takes "yarn" for longrope.
        rope_types=("default", "longrope"),
        refusals=(
            only("attention_bias", False, "there are no biases here; use a model without"),
            only("mlp_bias", False, "there are no biases here; use a model without"),
        ),
    ),
    table=decoder(INPUT_NORM, _QKV, OUTPUT, *_MLP),
)
