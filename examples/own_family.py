"""StableLM, a family that megarlhf does not have: Llama with layer norms, and a rotary embedding over a quarter of each
head.

    export PYTHONPATH=.
    megarlhf sft -c FILE actor.model.path=stablelm-2-1_6b actor.model.families=[examples.own_family]
    megarlhf convert hf-to-megatron --family examples.own_family --hf stablelm-2-1_6b --out DIR

How a family is written: docs/new-architecture.md.
"""

from megarlhf import family_parts as parts

FAMILY = parts.Family(
    model_type="stablelm",
    config=parts.ConfigSpec(
        lm_class="StableLmForCausalLM",
        scalar_class="StableLmForSequenceClassification",
        facts={
            **parts.RELATIVES_FACTS,
            "head_dim": parts.equal_heads,
            "norm": "layer",
            "norm_eps": parts.ConfigField(name="layer_norm_eps", read=parts.number, default=1e-5),
            **parts.NO_BIASES,
            "qkv_bias": parts.ConfigField(name="use_qkv_bias", read=parts.flag, default=False),
            "rotary_share": parts.ConfigField(name="partial_rotary_factor", read=parts.number, default=0.25),
        },
        refusals=(
            parts.only("qk_layernorm", False, "norms of queries and keys are not implemented; use a model without"),
            parts.only("use_parallel_residual", False, "attention and MLP are computed in turn; use such a model"),
        ),
    ),
    table=parts.Table(
        embedding=(parts.EMBEDDING,),
        layer=(
            *parts.layer_norm("input_layernorm", "input_layernorm", fused="self_attention.linear_qkv"),
            *parts.ATTENTION,
            parts.OUTPUT,
            *parts.layer_norm("post_attention_layernorm", "pre_mlp_layernorm", fused="mlp.linear_fc1"),
            *parts.GATED_MLP[1:],  # without its norm
        ),
        final=parts.layer_norm("model.norm", "decoder.final_layernorm"),
        lm_head=parts.LM_HEAD,
        scalar_head=parts.SCALAR_HEAD,
    ),
)
