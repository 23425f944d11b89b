"""OPT: GPT-like, with separate q, k and v, and a table of learned positions that begins two rows early."""

from __future__ import annotations

from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, Refusal, flag, one_of, only, positive
from megarlhf.architectures.entries import (
    ATTENTION,
    LM_HEAD,
    SCALAR_HEAD,
    entry,
    layer_norm,
    learned_positions,
    word_embedding,
)
from megarlhf.architectures.families.gpt2 import GPT_FACTS
from megarlhf.architectures.rules import split_columns, split_rows, whole
from megarlhf.architectures.table import Family, Table

_OUTPUT = (
    entry("self_attn.out_proj.weight", ("hidden", "q"), "residual", "self_attention.linear_proj.weight", split_columns),
    entry("self_attn.out_proj.bias", ("hidden",), "zeros", "self_attention.linear_proj.bias", whole),
)

_MLP = (
    entry("fc1.weight", ("ffn", "hidden"), "normal", "mlp.linear_fc1.weight", split_rows),
    entry("fc1.bias", ("ffn",), "zeros", "mlp.linear_fc1.bias", split_rows),
    entry("fc2.weight", ("hidden", "ffn"), "residual", "mlp.linear_fc2.weight", split_columns),
    entry("fc2.bias", ("hidden",), "zeros", "mlp.linear_fc2.bias", whole),
)


_REFUSALS = (
    only(
        "do_layer_norm_before", True, "norms after attention and MLP (opt-350m) are not implemented; use another size"
    ),
    only("_remove_final_layer_norm", False, "the final norm is always computed here; use a model that has one"),
    only("enable_bias", True, "biases are always there; use a model with them"),
    only("layer_norm_elementwise_affine", True, "norms have weights here; use a model whose norms have"),
    Refusal(
        "word_embed_proj_dim",
        lambda value, facts: value != facts["hidden_size"],
        "embeddings as wide as hidden_size are implemented, no projections (opt-350m); use another size",
    ),
)

FAMILY = Family(
    model_type="opt",
    config=ConfigSpec(
        lm_class="OPTForCausalLM",
        scalar_class="OPTForSequenceClassification",
        facts={
            "num_layers": ConfigField(name="num_hidden_layers", read=positive),
            "hidden_size": ConfigField(name="hidden_size", read=positive),
            "num_heads": ConfigField(name="num_attention_heads", read=positive),
            "ffn_size": ConfigField(name="ffn_dim", read=positive),
            "vocab_size": ConfigField(name="vocab_size", read=positive),
            "max_positions": ConfigField(name="max_position_embeddings", read=positive),
            "norm_eps": 1e-5,
            "tied_embeddings": ConfigField(name="tie_word_embeddings", read=flag, default=True),
            "activation": ConfigField(name="activation_function", read=one_of("relu", "gelu"), default="relu"),
            **GPT_FACTS,
            "position_offset": 2,
        },
        rope_theta=None,
        refusals=_REFUSALS,
    ),
    table=Table(
        # All rows, those of the offset too, in every system: position p stands in row p + 2.
        embedding=(
            word_embedding("model.decoder.embed_tokens.weight"),
            learned_positions("model.decoder.embed_positions.weight"),
        ),
        layer=(
            *layer_norm("self_attn_layer_norm", "input_layernorm", fused="self_attention.linear_qkv"),
            *ATTENTION,
            *_OUTPUT,
            *layer_norm("final_layer_norm", "pre_mlp_layernorm", fused="mlp.linear_fc1"),
            *_MLP,
        ),
        final=layer_norm("model.decoder.final_layer_norm", "decoder.final_layernorm"),
        lm_head=LM_HEAD,
        scalar_head=SCALAR_HEAD,
        hf_layer="model.decoder.layers.{layer}.",
        vllm_layer="model.decoder.layers.{layer}.",
    ),
)
