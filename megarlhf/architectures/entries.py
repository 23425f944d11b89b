"""Entries that several families share: norms, attention, MLPs and heads by the names Llama gave them."""

from __future__ import annotations

from megarlhf.architectures.rules import (
    qkv_by_group,
    qkv_by_kind,
    split_columns,
    split_rows,
    split_vocab,
    whole,
)
from megarlhf.architectures.table import Entry, Init, Place

INPUT_NORM = Entry(
    tensors=(("input_layernorm.weight", ("hidden",)),),
    init="ones",
    megatron=Place("input_layernorm.weight", whole),
    te_name="self_attention.linear_qkv.layer_norm_weight",
    vllm=Place("input_layernorm.weight", whole),
)

ATTENTION = (
    Entry(
        tensors=(
            ("self_attn.q_proj.weight", ("q", "hidden")),
            ("self_attn.k_proj.weight", ("kv", "hidden")),
            ("self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        init="normal",
        megatron=Place("self_attention.linear_qkv.weight", qkv_by_group),
        vllm=Place("self_attn.qkv_proj.weight", qkv_by_kind),
    ),
    Entry(
        tensors=(
            ("self_attn.q_proj.bias", ("q",)),
            ("self_attn.k_proj.bias", ("kv",)),
            ("self_attn.v_proj.bias", ("kv",)),
        ),
        init="zeros",
        megatron=Place("self_attention.linear_qkv.bias", qkv_by_group),
        vllm=Place("self_attn.qkv_proj.bias", qkv_by_kind),
        when=lambda arch: arch.qkv_bias,
    ),
)
"""q, k and v."""

OUTPUT = Entry(
    tensors=(("self_attn.o_proj.weight", ("hidden", "q")),),
    init="residual",
    megatron=Place("self_attention.linear_proj.weight", split_columns),
    vllm=Place("self_attn.o_proj.weight", split_columns),
)

OUTPUT_BIAS = Entry(
    tensors=(("self_attn.o_proj.bias", ("hidden",)),),
    init="zeros",
    megatron=Place("self_attention.linear_proj.bias", whole),
    vllm=Place("self_attn.o_proj.bias", whole),
    when=lambda arch: arch.output_bias,
)

QK_NORMS = (
    Entry(
        tensors=(("self_attn.q_norm.weight", ("head",)),),
        init="ones",
        megatron=Place("self_attention.q_layernorm.weight", whole),
        vllm=Place("self_attn.q_norm.weight", whole),
    ),
    Entry(
        tensors=(("self_attn.k_norm.weight", ("head",)),),
        init="ones",
        megatron=Place("self_attention.k_layernorm.weight", whole),
        vllm=Place("self_attn.k_norm.weight", whole),
    ),
)

GATED_MLP = (
    Entry(
        tensors=(("post_attention_layernorm.weight", ("hidden",)),),
        init="ones",
        megatron=Place("pre_mlp_layernorm.weight", whole),
        te_name="mlp.linear_fc1.layer_norm_weight",
        vllm=Place("post_attention_layernorm.weight", whole),
    ),
    Entry(
        tensors=(
            ("mlp.gate_proj.weight", ("ffn", "hidden")),
            ("mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        init="normal",
        megatron=Place("mlp.linear_fc1.weight", split_rows),
        vllm=Place("mlp.gate_up_proj.weight", split_rows),
    ),
    Entry(
        tensors=(("mlp.down_proj.weight", ("hidden", "ffn")),),
        init="residual",
        megatron=Place("mlp.linear_fc2.weight", split_columns),
        vllm=Place("mlp.down_proj.weight", split_columns),
    ),
)
"""The norm before it, then silu(gate) x up and down."""

MLP_BIASES = (
    Entry(
        tensors=(("mlp.gate_proj.bias", ("ffn",)), ("mlp.up_proj.bias", ("ffn",))),
        init="zeros",
        megatron=Place("mlp.linear_fc1.bias", split_rows),
        vllm=Place("mlp.gate_up_proj.bias", split_rows),
        when=lambda arch: arch.mlp_bias,
    ),
    Entry(
        tensors=(("mlp.down_proj.bias", ("hidden",)),),
        init="zeros",
        megatron=Place("mlp.linear_fc2.bias", whole),
        vllm=Place("mlp.down_proj.bias", whole),
        when=lambda arch: arch.mlp_bias,
    ),
)

EMBEDDING = Entry(
    tensors=(("model.embed_tokens.weight", ("vocab", "hidden")),),
    init="normal",
    megatron=Place("embedding.word_embeddings.weight", split_vocab),
    vllm=Place("model.embed_tokens.weight", split_vocab),
)

FINAL_NORM = Entry(
    tensors=(("model.norm.weight", ("hidden",)),),
    init="ones",
    megatron=Place("decoder.final_layernorm.weight", whole),
    vllm=Place("model.norm.weight", whole),
)

LM_HEAD = Entry(
    tensors=(("lm_head.weight", ("vocab", "hidden")),),
    init="normal",
    megatron=Place("output_layer.weight", split_vocab),
    vllm=Place("lm_head.weight", split_vocab),
)

SCALAR_HEAD = Entry(
    tensors=(("score.weight", ("one", "hidden")),),
    init="score",
    megatron=Place("output_layer.weight", whole),
    vllm=Place("score.weight", whole),
)


def layer_norm(name: str, megatron: str, fused: str | None = None) -> tuple[Entry, Entry]:
    """Weight and bias of a LayerNorm; transformer-engine keeps both in the linear layer `fused` after it."""

    def entry(kind: str, init: Init) -> Entry:
        return Entry(
            tensors=((f"{name}.{kind}", ("hidden",)),),
            init=init,
            megatron=Place(f"{megatron}.{kind}", whole),
            te_name=f"{fused}.layer_norm_{kind}" if fused else None,
            vllm=Place(f"{name}.{kind}", whole),
        )

    return entry("weight", "ones"), entry("bias", "zeros")
