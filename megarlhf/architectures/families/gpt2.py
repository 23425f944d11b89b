"""GPT-2: learned positions, LayerNorms with biases, weights stored as [input, output] (Conv1D), q, k and v in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.architectures.config_spec import (
    ConfigField,
    ConfigSpec,
    equal_heads,
    flag,
    number,
    one_of,
    only,
    positive,
)
from megarlhf.architectures.entries import LM_HEAD, SCALAR_HEAD, entry, layer_norm, learned_positions, word_embedding
from megarlhf.architectures.rules import qkv_by_group, qkv_by_kind, split_columns, split_rows, transposed, whole
from megarlhf.architectures.table import Entry, Family, Place, Table

GPT_FACTS: Mapping[str, Any] = {
    "num_kv_heads": lambda facts: facts["num_heads"],
    "head_dim": equal_heads,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "gated_mlp": False,
    "norm": "layer",
    "positions": "learned",
}
"""Facts of every GPT-2 and OPT that their config.json does not state."""

_ATTENTION = (
    Entry(
        tensors=(("attn.c_attn.weight", ("hidden", "qkv")),),
        init="normal",
        megatron=Place("self_attention.linear_qkv.weight", transposed(qkv_by_group)),
        vllm=Place("attn.c_attn.weight", transposed(qkv_by_kind)),
    ),
    Entry(
        tensors=(("attn.c_attn.bias", ("qkv",)),),
        init="zeros",
        megatron=Place("self_attention.linear_qkv.bias", qkv_by_group),
        vllm=Place("attn.c_attn.bias", qkv_by_kind),
    ),
    entry(
        "attn.c_proj.weight",
        ("q", "hidden"),
        "residual",
        "self_attention.linear_proj.weight",
        transposed(split_columns),
    ),
    entry("attn.c_proj.bias", ("hidden",), "zeros", "self_attention.linear_proj.bias", whole),
)

_MLP = (
    entry("mlp.c_fc.weight", ("hidden", "ffn"), "normal", "mlp.linear_fc1.weight", transposed(split_rows)),
    entry("mlp.c_fc.bias", ("ffn",), "zeros", "mlp.linear_fc1.bias", split_rows),
    entry("mlp.c_proj.weight", ("ffn", "hidden"), "residual", "mlp.linear_fc2.weight", transposed(split_columns)),
    entry("mlp.c_proj.bias", ("hidden",), "zeros", "mlp.linear_fc2.bias", whole),
)

_REFUSALS = (
    only(
        "scale_attn_by_inverse_layer_idx",
        False,
        "attention scores are not divided by the layer's number here; use a model trained without it",
    ),
    only(
        "scale_attn_weights",
        True,
        "attention scores are always divided by sqrt(head_dim) here; use a model trained with it",
    ),
    only("add_cross_attention", False, "there is no cross attention here; use a model without an encoder"),
)

FAMILY = Family(
    model_type="gpt2",
    config=ConfigSpec(
        lm_class="GPT2LMHeadModel",
        scalar_class="GPT2ForSequenceClassification",
        facts={
            "num_layers": ConfigField(name="n_layer", read=positive),
            "hidden_size": ConfigField(name="n_embd", read=positive),
            "num_heads": ConfigField(name="n_head", read=positive),
            "ffn_size": ConfigField(name="n_inner", read=positive, default=lambda facts: 4 * facts["hidden_size"]),
            "vocab_size": ConfigField(name="vocab_size", read=positive),
            "max_positions": ConfigField(name="n_positions", read=positive, alias="n_ctx"),
            "norm_eps": ConfigField(name="layer_norm_epsilon", read=number, default=1e-5),
            "tied_embeddings": ConfigField(name="tie_word_embeddings", read=flag, default=True),
            "activation": ConfigField(
                name="activation_function",
                read=one_of("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
                default="gelu_new",
            ),
            **GPT_FACTS,
        },
        rope_theta=None,
        refusals=_REFUSALS,
    ),
    table=Table(
        embedding=(word_embedding("transformer.wte.weight"), learned_positions("transformer.wpe.weight")),
        layer=(
            *layer_norm("ln_1", "input_layernorm", fused="self_attention.linear_qkv"),
            *_ATTENTION,
            *layer_norm("ln_2", "pre_mlp_layernorm", fused="mlp.linear_fc1"),
            *_MLP,
        ),
        final=layer_norm("transformer.ln_f", "decoder.final_layernorm"),
        lm_head=LM_HEAD,
        scalar_head=SCALAR_HEAD,
        hf_prefix="transformer.",
        hf_ignored=(".attn.bias", ".attn.masked_bias"),
        hf_layer="transformer.h.{layer}.",
        vllm_layer="transformer.h.{layer}.",
    ),
)
