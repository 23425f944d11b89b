"""Entries that several families share: norms, attention, MLPs and heads by the names Llama gave them."""

from __future__ import annotations

from collections.abc import Callable

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.rules import (
    qkv_by_group,
    qkv_by_kind,
    split_columns,
    split_rows,
    split_vocab,
    whole,
)
from megarlhf.architectures.table import Entry, Init, Place, Rule, always


def entry(
    name: str,
    shape: tuple[str, ...],
    init: Init,
    megatron: str,
    rule: Rule,
    *,
    te_name: str | None = None,
    when: Callable[[Architecture], bool] = always,
) -> Entry:
    """One tensor with a storage of its own, which vLLM names as Hugging Face does and cuts as Megatron does."""
    return Entry(
        tensors=((name, shape),),
        init=init,
        megatron=Place(megatron, rule),
        vllm=Place(name, rule),
        te_name=te_name,
        when=when,
    )


def rms_norm(name: str, megatron: str, fused: str | None = None) -> Entry:
    """The weight of a norm; transformer-engine keeps it in the linear layer `fused` after it."""
    te_name = f"{fused}.layer_norm_weight" if fused else None
    return entry(f"{name}.weight", ("hidden",), "ones", f"{megatron}.weight", whole, te_name=te_name)


def layer_norm(name: str, megatron: str, fused: str | None = None) -> tuple[Entry, Entry]:
    """Weight and bias, as `rms_norm`."""
    te_name = f"{fused}.layer_norm_bias" if fused else None
    bias = entry(f"{name}.bias", ("hidden",), "zeros", f"{megatron}.bias", whole, te_name=te_name)
    return rms_norm(name, megatron, fused), bias


def word_embedding(name: str) -> Entry:
    return entry(name, ("vocab", "hidden"), "normal", "embedding.word_embeddings.weight", split_vocab)


def learned_positions(name: str) -> Entry:
    return entry(name, ("positions", "hidden"), "normal", "embedding.position_embeddings.weight", whole)


INPUT_NORM = rms_norm("input_layernorm", "input_layernorm", fused="self_attention.linear_qkv")

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

OUTPUT = entry(
    "self_attn.o_proj.weight", ("hidden", "q"), "residual", "self_attention.linear_proj.weight", split_columns
)
OUTPUT_BIAS = entry(
    "self_attn.o_proj.bias",
    ("hidden",),
    "zeros",
    "self_attention.linear_proj.bias",
    whole,
    when=lambda arch: arch.output_bias,
)

QK_NORMS = (
    entry("self_attn.q_norm.weight", ("head",), "ones", "self_attention.q_layernorm.weight", whole),
    entry("self_attn.k_norm.weight", ("head",), "ones", "self_attention.k_layernorm.weight", whole),
)

PRE_MLP_NORM = rms_norm("post_attention_layernorm", "pre_mlp_layernorm", fused="mlp.linear_fc1")

GATED_MLP = (
    PRE_MLP_NORM,
    Entry(
        tensors=(("mlp.gate_proj.weight", ("ffn", "hidden")), ("mlp.up_proj.weight", ("ffn", "hidden"))),
        init="normal",
        megatron=Place("mlp.linear_fc1.weight", split_rows),
        vllm=Place("mlp.gate_up_proj.weight", split_rows),
    ),
    entry("mlp.down_proj.weight", ("hidden", "ffn"), "residual", "mlp.linear_fc2.weight", split_columns),
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
    entry("mlp.down_proj.bias", ("hidden",), "zeros", "mlp.linear_fc2.bias", whole, when=lambda arch: arch.mlp_bias),
)

EMBEDDING = word_embedding("model.embed_tokens.weight")
FINAL_NORM = rms_norm("model.norm", "decoder.final_layernorm")
LM_HEAD = entry("lm_head.weight", ("vocab", "hidden"), "normal", "output_layer.weight", split_vocab)
SCALAR_HEAD = entry("score.weight", ("one", "hidden"), "score", "output_layer.weight", whole)
