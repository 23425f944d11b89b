"""draft"""
from __future__ import annotations
from typing import Any
from megarlhf.models.build import ModelShard
from megarlhf.models.elementwise import SiluGate
from megarlhf.models.norm import LayerNorm, RMSNorm
from megarlhf.rehearsal.te_layers import Attention, FoldedNorm, Gate, Linear, Norm, NormLinear, Shared


def replace_layers(shard: ModelShard, shared: Shared) -> None:
    decoder: Any = shard.module.decoder
    for layer in decoder.layers:
        attention = layer.self_attention
        attention.linear_qkv = NormLinear(layer.input_layernorm, attention.linear_qkv, shared)
        layer.input_layernorm = FoldedNorm(layer.input_layernorm)
        if shard.arch.qk_norm:
            attention.q_layernorm, attention.k_layernorm = Norm(attention.q_layernorm), Norm(attention.k_layernorm)
        attention.core_attention = Attention(attention.core_attention)
        attention.linear_proj = Linear(attention.linear_proj, shared, by_rows=True)
        if shard.arch.num_experts:
            layer.pre_mlp_layernorm = Norm(layer.pre_mlp_layernorm)
            for expert in layer.mlp.experts.local_experts:
                _replace_mlp(expert, Linear(expert.linear_fc1, shared, by_rows=False), shared)
        else:
            _replace_mlp(layer.mlp, NormLinear(layer.pre_mlp_layernorm, layer.mlp.linear_fc1, shared), shared)
            layer.pre_mlp_layernorm = FoldedNorm(layer.pre_mlp_layernorm)
    if decoder.final_layernorm is not None:
        decoder.final_layernorm = Norm(decoder.final_layernorm)


def _replace_mlp(mlp: Any, first: Linear, shared: Shared) -> None:
    mlp.linear_fc1 = first
    if isinstance(mlp.activation_func, SiluGate):
        mlp.activation_func = Gate()
    mlp.linear_fc2 = Linear(mlp.linear_fc2, shared, by_rows=True)
