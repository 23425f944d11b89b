"""Building a role's model: architecture + mesh -> a stage of a Megatron-Core GPTModel with its weights.

The layer spec is chosen by capability: TransformerEngine's on a GPU machine that has it, otherwise our local one.
Weights are not initialised here; `load_weights` fills every parameter by a copy plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megarlhf.config import ModelConfig, ParallelConfig
from megarlhf.layout import split_layers
from megarlhf.models.attention import CausalAttention
from megarlhf.models.heads import ScalarHead
from megarlhf.models.norm import RMSNorm
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.mesh import Mesh
from megarlhf.runtime import has_transformer_engine
from megarlhf.weights.architecture import Architecture, Llama3Rope
from megarlhf.weights.placement import Placement, RankPlacements
from megarlhf.weights.tensor_map import Head, Spec, megatron_placements, padded_vocab_size

log = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelPart:
    """What this rank holds of a role's model: one pipeline stage, and where it stands."""

    module: GPTModel
    arch: Architecture
    mesh: Mesh
    head: Head
    parallel: ParallelConfig
    padded_vocab: int
    spec: Spec

    def parameters(self) -> dict[str, Tensor]:
        """Megatron name -> live parameter."""
        return dict(self.module.named_parameters())


def build_model(model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, arch: Architecture, head: Head) -> ModelPart:
    """A stage of the model on this rank's device, its parameters still unset."""
    spec: Spec = "te" if has_transformer_engine() else "local"
    log.info(
        "layer spec: %s",
        "transformer-engine" if spec == "te" else "local (Megatron-Core parts, torch attention)",
    )
    config = transformer_config(model, parallel, mesh, arch)
    stage_layers = split_layers(arch.num_layers, parallel.pp, parallel.layers_per_stage)[mesh.at.pp]
    padded_vocab = padded_vocab_size(arch.vocab_size, parallel.tp, model.vocab_multiple)
    with megatron_device(mesh.runtime.device):
        module = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(spec, len(stage_layers)),
            vocab_size=padded_vocab,
            max_sequence_length=arch.max_positions,
            pre_process=mesh.is_first_stage,
            post_process=mesh.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied_embeddings and head == "lm",
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            pg_collection=mesh.groups,
        )
        if arch.rope_scaling is not None:
            # Megatron-Core's own scaling takes the factor only and assumes Llama 3.1's other three numbers.
            module.rotary_pos_emb.inv_freq = llama3_frequencies(module.rotary_pos_emb.inv_freq, arch.rope_scaling)
        if head == "scalar" and mesh.is_last_stage:
            module.output_layer = ScalarHead(config, mesh.groups)
        module.to(mesh.runtime.device)
    part = ModelPart(
        module=module,
        arch=arch,
        mesh=mesh,
        head=head,
        parallel=parallel,
        padded_vocab=padded_vocab,
        spec=spec,
    )
    _mark_sharded(part)
    return part


def llama3_frequencies(inverse_frequencies_D: Tensor, rope: Llama3Rope) -> Tensor:
    """Llama 3.1's scaling of rotary frequencies: long wavelengths by the factor, short ones not, blended between.

    Shapes:  [D / 2] -> [D / 2], radians per position
    Source:  Llama 3.1's released code; Hugging Face's rope type `llama3`
    """
    turns_D = rope.original_max_positions * inverse_frequencies_D / (2 * math.pi)
    blend_D = (turns_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_D = blend_D.clamp(0.0, 1.0)
    return inverse_frequencies_D * (blend_D + (1.0 - blend_D) / rope.factor)


def placements_on(part: ModelPart, rank: int, *, tp_rank: int | None = None) -> RankPlacements:
    """What global rank `rank` (or its neighbour `tp_rank` of the tensor-parallel group) holds of the model."""
    layout = part.mesh.layout
    at = layout.coordinates(rank)
    return megatron_placements(
        part.arch,
        tp=layout.tp,
        tp_rank=at.tp if tp_rank is None else tp_rank,
        layers=split_layers(part.arch.num_layers, layout.pp, part.parallel.layers_per_stage)[at.pp],
        first_stage=at.pp == 0,
        last_stage=at.pp == layout.pp - 1,
        padded_vocab=part.padded_vocab,
        rank=rank,
        head=part.head,
        spec=part.spec,
    )


def _mark_sharded(part: ModelPart) -> None:
    """Tell Megatron which parameters differ between tensor-parallel ranks, from our own table.

    Megatron sets these marks only while it initialises weights, which it does not do here; without them the
    gradient norm would count one shard of each sharded parameter instead of all.
    """
    if part.mesh.layout.tp == 1:
        return
    boxes: list[dict[str, list[Placement]]] = []
    for tp_rank in (0, 1):
        by_storage: dict[str, list[Placement]] = {}
        for placement in placements_on(part, part.mesh.runtime.rank, tp_rank=tp_rank).placements:
            by_storage.setdefault(placement.storage, []).append(placement)
        boxes.append(by_storage)
    for name, parameter in part.parameters().items():
        parameter.tensor_model_parallel = boxes[0].get(name) != boxes[1].get(name)  # type: ignore[attr-defined]


def transformer_config(
    model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, arch: Architecture
) -> TransformerConfig:
    """Megatron-Core's configuration of this architecture. Dropout is 0: log-probs must be functions."""
    if arch.output_bias != arch.mlp_bias:
        raise ValueError(
            f"config.json says attention_bias = {arch.output_bias} and mlp_bias = {arch.mlp_bias}; Megatron-Core's "
            "layers take both or neither"
        )
    dtype = DTYPES[model.dtype]
    uneven: dict[str, int] = {} if parallel.layers_per_stage is None else _uneven_stages(parallel.layers_per_stage)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=arch.mlp_bias,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=mesh.runtime.device.type == "cpu",
        # The loss is a sum over a denominator of the whole mini-batch; nothing may divide it again.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        **uneven,
    )


def _uneven_stages(layers_per_stage: tuple[int, ...]) -> dict[str, int]:
    """Megatron-Core states a first and a last stage of their own; the stages between them are equal."""
    middle = set(layers_per_stage[1:-1])
    if len(middle) > 1:
        raise ValueError(
            f"layers_per_stage = {list(layers_per_stage)}: the stages between the first and the last must be equal"
        )
    if len(layers_per_stage) == 1:
        return {}
    return {
        "num_layers_in_first_pipeline_stage": layers_per_stage[0],
        "num_layers_in_last_pipeline_stage": layers_per_stage[-1],
    }


def _block_spec(spec: Spec, num_layers: int) -> TransformerBlockSubmodules:
    if spec == "te":
        # Not run in CI: transformer-engine needs a GPU. Norms are fused into the linear layers.
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec()
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=[_local_layer()] * num_layers, layer_norm=RMSNorm)


def _local_layer() -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CausalAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
