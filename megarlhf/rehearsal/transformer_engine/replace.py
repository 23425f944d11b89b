"""Replacement of a rehearsed model's layers by stand-ins for TransformerEngine's (`transformer_engine/layers.py`).

TransformerEngine cannot be imported without CUDA. The stand-ins follow version 2.11.0, which
requirements/transformer-engine.txt pins; the linear layers of 2.9 and 2.10 save the same. A model keeps the parameter
names of the local spec: shapes and sum are those of TransformerEngine's, and architecture's table, resharder and module
agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from megarlhf.architectures.architecture import Architecture
from megarlhf.models.build import ModelShard
from megarlhf.models.elementwise import SiluGate
from megarlhf.rehearsal.transformer_engine.layers import Attention, FoldedNorm, Gate, Linear, Norm, NormLinear, Shared

Layers = Literal["te", "local"]
"""Layers of a rehearsed GPU. `local`: as on a machine without TransformerEngine."""


def replace_layers(shard: ModelShard, shared: Shared) -> None:
    """Put the stand-ins in place of the layers of a stage that was built with the local spec. Parameters, their names
    and their order stay."""
    assert shard.spec == "local", "this machine has TransformerEngine, and a rehearsal wants none of its modules"
    for chunk in shard.chunks:
        _replace_in(chunk.decoder, shard.arch, shared)


def _replace_in(decoder: Any, arch: Architecture, shared: Shared) -> None:
    for layer in decoder.layers:
        attention = layer.self_attention
        attention.linear_qkv = NormLinear(layer.input_layernorm, attention.linear_qkv, shared)
        layer.input_layernorm = FoldedNorm(layer.input_layernorm)
        if arch.qk_norm:
            attention.q_layernorm, attention.k_layernorm = Norm(attention.q_layernorm), Norm(attention.k_layernorm)
        attention.core_attention = Attention(attention.core_attention)
        attention.linear_proj = Linear(attention.linear_proj, shared, by_rows=True)
        if arch.num_experts:
            layer.pre_mlp_layernorm = Norm(layer.pre_mlp_layernorm)
            for expert in layer.mlp.experts.local_experts:
                _replace_mlp(expert, Linear(expert.linear_fc1, shared, by_rows=False), shared)
                expert.forward = partial(_fused_expert, expert)
        else:
            _replace_mlp(layer.mlp, NormLinear(layer.pre_mlp_layernorm, layer.mlp.linear_fc1, shared), shared)
            layer.pre_mlp_layernorm = FoldedNorm(layer.pre_mlp_layernorm)
    if decoder.final_layernorm is not None:
        decoder.final_layernorm = Norm(decoder.final_layernorm)


def _replace_mlp(mlp: Any, first: Linear, shared: Shared) -> None:
    mlp.linear_fc1 = first
    if isinstance(mlp.activation_func, SiluGate):  # of the local spec only
        mlp.activation_func = Gate()
    mlp.linear_fc2 = Linear(mlp.linear_fc2, shared, by_rows=True)


def _fused_expert(expert: Any, hidden_KH: Tensor, weights_K: Tensor) -> tuple[Tensor, None]:
    """Megatron-Core's expert with the gate and the weights of its tokens in one step."""
    assert isinstance(expert.activation_func, Gate), "experts have a silu gate"
    product_KF, _ = expert.linear_fc1(hidden_KH)
    out_KH, _ = expert.linear_fc2(expert.activation_func(product_KF, weights_K.unsqueeze(-1)))
    return out_KH, None
