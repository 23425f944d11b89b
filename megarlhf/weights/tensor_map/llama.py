"""Llama (1 to 3.x): grouped-query attention, gated MLP, RMS norms, optional biases."""

from __future__ import annotations

from megarlhf.weights.tensor_map.rules import (
    qkv_by_group,
    qkv_by_kind,
    split_columns,
    split_rows,
    split_vocab,
    whole,
)
from megarlhf.weights.tensor_map.table import Entry, Table

_LAYER = (
    Entry(
        tensors=(("input_layernorm.weight", ("hidden",)),),
        init="ones",
        megatron=("input_layernorm.weight", whole),
        te_name="self_attention.linear_qkv.layer_norm_weight",
        vllm=("input_layernorm.weight", whole),
    ),
    Entry(
        tensors=(
            ("self_attn.q_proj.weight", ("q", "hidden")),
            ("self_attn.k_proj.weight", ("kv", "hidden")),
            ("self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        init="normal",
        megatron=("self_attention.linear_qkv.weight", qkv_by_group),
        vllm=("self_attn.qkv_proj.weight", qkv_by_kind),
    ),
    Entry(
        tensors=(
            ("self_attn.q_proj.bias", ("q",)),
            ("self_attn.k_proj.bias", ("kv",)),
            ("self_attn.v_proj.bias", ("kv",)),
        ),
        init="zeros",
        megatron=("self_attention.linear_qkv.bias", qkv_by_group),
        vllm=("self_attn.qkv_proj.bias", qkv_by_kind),
        when=lambda arch: arch.qkv_bias,
    ),
    Entry(
        tensors=(("self_attn.o_proj.weight", ("hidden", "q")),),
        init="residual",
        megatron=("self_attention.linear_proj.weight", split_columns),
        vllm=("self_attn.o_proj.weight", split_columns),
    ),
    Entry(
        tensors=(("self_attn.o_proj.bias", ("hidden",)),),
        init="zeros",
        megatron=("self_attention.linear_proj.bias", whole),
        vllm=("self_attn.o_proj.bias", whole),
        when=lambda arch: arch.output_bias,
    ),
    Entry(
        tensors=(("post_attention_layernorm.weight", ("hidden",)),),
        init="ones",
        megatron=("pre_mlp_layernorm.weight", whole),
        te_name="mlp.linear_fc1.layer_norm_weight",
        vllm=("post_attention_layernorm.weight", whole),
    ),
    Entry(
        tensors=(
            ("mlp.gate_proj.weight", ("ffn", "hidden")),
            ("mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        init="normal",
        megatron=("mlp.linear_fc1.weight", split_rows),
        vllm=("mlp.gate_up_proj.weight", split_rows),
    ),
    Entry(
        tensors=(("mlp.gate_proj.bias", ("ffn",)), ("mlp.up_proj.bias", ("ffn",))),
        init="zeros",
        megatron=("mlp.linear_fc1.bias", split_rows),
        vllm=("mlp.gate_up_proj.bias", split_rows),
        when=lambda arch: arch.mlp_bias,
    ),
    Entry(
        tensors=(("mlp.down_proj.weight", ("hidden", "ffn")),),
        init="residual",
        megatron=("mlp.linear_fc2.weight", split_columns),
        vllm=("mlp.down_proj.weight", split_columns),
    ),
    Entry(
        tensors=(("mlp.down_proj.bias", ("hidden",)),),
        init="zeros",
        megatron=("mlp.linear_fc2.bias", whole),
        vllm=("mlp.down_proj.bias", whole),
        when=lambda arch: arch.mlp_bias,
    ),
)

LLAMA = Table(
    embedding=(
        Entry(
            tensors=(("model.embed_tokens.weight", ("vocab", "hidden")),),
            init="normal",
            megatron=("embedding.word_embeddings.weight", split_vocab),
            vllm=("model.embed_tokens.weight", split_vocab),
        ),
    ),
    layer=_LAYER,
    final=(
        Entry(
            tensors=(("model.norm.weight", ("hidden",)),),
            init="ones",
            megatron=("decoder.final_layernorm.weight", whole),
            vllm=("model.norm.weight", whole),
        ),
    ),
    lm_head=Entry(
        tensors=(("lm_head.weight", ("vocab", "hidden")),),
        init="normal",
        megatron=("output_layer.weight", split_vocab),
        vllm=("lm_head.weight", split_vocab),
    ),
    scalar_head=Entry(
        tensors=(("score.weight", ("one", "hidden")),),
        init="score",
        megatron=("output_layer.weight", whole),
        vllm=("score.weight", whole),
    ),
)
