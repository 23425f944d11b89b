"""Layer specs: TransformerEngine's modules where they are installed, otherwise our local spec."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Spec
from megarlhf.models.attention.layers import CausalAttention, GroupedSelfAttention, with_packed_rows
from megarlhf.models.elementwise import SiluGate
from megarlhf.models.experts import ExpertsLayer, Router
from megarlhf.models.norm import LayerNorm, RMSNorm


def block_spec(spec: Spec, arch: Architecture, num_layers: int) -> TransformerBlockSubmodules:
    """Spec of a stage: `num_layers` equal layers, and the final norm in the last stage."""
    if spec == "te":
        # Not run in CI, since transformer-engine needs a GPU. Norms are fused into the linear layers.
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layer_specs=[_te_layer(arch)] * num_layers, layer_norm=TENorm)
    norm = RMSNorm if arch.norm == "rms" else LayerNorm
    return TransformerBlockSubmodules(layer_specs=[_local_layer(arch)] * num_layers, layer_norm=norm)


def gates_by_silu(spec: Spec, arch: Architecture) -> bool:
    """Return whether MLPs and experts have `SiluGate` as their activation; see `settings.transformer_config`."""
    return spec == "local" and arch.gated_mlp and arch.activation == "silu"


def fuses_gate(spec: Spec, arch: Architecture) -> bool:
    """Return whether the activation is Megatron-Core's fused gate. It is the same function, compiled by `torch.compile`
    into one kernel each way, and keeps the first product only."""
    return spec == "te" and arch.gated_mlp and arch.activation == "silu"


def _te_layer(arch: Architecture) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=arch.num_experts or None, moe_grouped_gemm=True, qk_layernorm=arch.qk_norm
    )
    parts = layer.submodules
    attention = parts.self_attention
    params = {**attention.params, "output_bias": arch.output_bias}
    core = with_packed_rows(attention.submodules.core_attention)
    submodules = replace(attention.submodules, core_attention=core)
    attention = replace(attention, module=GroupedSelfAttention, params=params, submodules=submodules)
    mlp = parts.mlp
    if arch.num_experts:
        mlp = replace(mlp, submodules=replace(mlp.submodules, router=Router))
    return replace(layer, module=_layer_module(arch), submodules=replace(parts, self_attention=attention, mlp=mlp))


def _layer_module(arch: Architecture) -> type[TransformerLayer]:
    return ExpertsLayer if arch.num_experts else TransformerLayer


def _local_layer(arch: Architecture) -> ModuleSpec:
    norm = RMSNorm if arch.norm == "rms" else LayerNorm
    qk_norm = RMSNorm if arch.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=GroupedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "output_bias": arch.output_bias},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CausalAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=_layer_module(arch),
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_local_mlp(arch),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _local_mlp(arch: Architecture) -> ModuleSpec:
    gate = SiluGate if gates_by_silu("local", arch) else None
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=gate)
    if not arch.num_experts:
        return ModuleSpec(module=MLP, submodules=linear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linear)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
