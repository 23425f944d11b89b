"""Translation of an architecture and a layout into Megatron-Core's TransformerConfig, field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Spec
from megarlhf.config import Dtype, ParallelConfig, RoleConfig
from megarlhf.models.attention.rotary_frequencies import attention_factor
from megarlhf.parallel.mesh import Mesh

DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in the tanh approximation that GPT-2 was trained with (Hendrycks and Gimpel, 2016)."""
    return nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": nn.functional.relu,
}
"""Hugging Face's name -> activation."""


def transformer_config(
    dtype: torch.dtype,
    section: RoleConfig,
    mesh: Mesh,
    arch: Architecture,
    *,
    spec: Spec,
    activation_module: bool,
    fused_gate: bool,
) -> TransformerConfig:
    """Megatron-Core's configuration of this architecture. Dropout is 0: log-probs must be functions.

    The reasons for the fusions: docs/design.md. The bias of the attention's output is not set here, but in
    `models/attention/layers.py`.

    activation_module: the layer spec brings a module for the activation
    fused_gate: Megatron-Core's own activation is fused
    """
    parallel = section.parallel
    config = TransformerConfig(
        **_model(arch),
        # Upstream's name; the module need not be TransformerEngine's.
        use_te_activation_func=activation_module,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        # Parameters are made on the device of `parallel/megatron_cpu.py`.
        use_cpu_initialization=False,
        # Sums gradients of embeddings in a fixed order. TransformerEngine also demands its environment variable.
        deterministic_mode=mesh.runtime.deterministic,
        # The loss is already divided by a denominator of the whole mini-batch; nothing may divide it again.
        calculate_per_token_loss=True,
        # Set layer by layer where it is possible: `models/build.py`.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused_gate,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        **_recomputation(section),
        **(_experts(arch, parallel, spec) | _stages(parallel, mesh)),
    )
    _scale_rotary(config, attention_factor(arch.rope_scaling))
    return config


def _model(arch: Architecture) -> dict[str, Any]:
    """Sizes and functions of the layers."""
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn_size,
        "normalization": "RMSNorm" if arch.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": arch.norm_eps,
        "qk_layernorm": arch.qk_norm,
        "gated_linear_unit": arch.gated_mlp,
        "activation_func": ACTIVATIONS[arch.activation],
        "add_bias_linear": arch.mlp_bias,
        "add_qkv_bias": arch.qkv_bias,
        # Tokens to the left and to the right of a token, without itself.
        "window_size": None if arch.sliding_window is None else (arch.sliding_window - 1, 0),
    }


def _scale_rotary(config: TransformerConfig, factor: float) -> None:
    """Make Megatron-Core's attention multiply the cosines and sines of padded rows by `factor`.

    Megatron-Core computes its factor as (0.1 a ln s + 1) / (0.1 b ln s + 1), from three numbers that one of its model
    types sets on the configuration. With ln s = 10 and b = 0 that is a + 1.
    """
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.exp(10)
        config.yarn_mscale = factor - 1
        config.yarn_mscale_all_dim = 0.0


def _recomputation(section: RoleConfig) -> dict[str, Any]:
    """Megatron-Core's options for recomputation, which happens in training only."""
    match section.recompute:
        case "core_attention":
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case "layers":
            num_layers = section.recompute_layers
            return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": num_layers}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


def _experts(arch: Architecture, parallel: ParallelConfig, spec: Spec) -> dict[str, Any]:
    """Options for routing as Hugging Face computes it: softmax over all experts in fp32, then the k largest, which may
    be rescaled to sum to 1.

    Rescaling the k largest equals the softmax over their logits alone, which is Megatron's default. The load-balancing
    loss is ours (`parallel/router_balance.py`): Megatron-Core's is computed over a micro-batch and includes padding.
    """
    if not arch.num_experts:
        return {}
    return {
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.expert_ffn_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.renormalize_experts,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": spec == "te",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.tp,
    }


def _stages(parallel: ParallelConfig, mesh: Mesh) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if parallel.pp > 1:
        # Packed micro-batches differ in length. Megatron then demands this dispatcher, even without experts.
        options |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    if parallel.vpp > 1:
        # With two ranks, batched messages would be mixed up between the stages that the two ranks share.
        options |= {
            "virtual_pipeline_model_parallel_size": parallel.vpp,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if parallel.layers_per_stage is not None:
        options["pipeline_model_parallel_layout"] = StageLayout(
            parallel.layers_per_stage, parallel.pp, mesh.coordinates.pp
        )
    return options


class StageLayout(PipelineParallelLayerLayout):
    """Pipeline stages of any sizes, seen from pipeline rank `stage`.

    Upstream reads the rank and the number of virtual stages from `parallel_state`, which is not initialised here.
    """

    def __init__(self, layers_per_stage: Sequence[int], pp: int, stage: int) -> None:
        rows = [["decoder"] * count for count in layers_per_stage]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, pp)
        self._sizes, self._pp, self._stage = tuple(layers_per_stage), pp, stage

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Number of layers in all earlier stages."""
        assert layer_type is LayerType.decoder, f"offsets are of decoder layers, got {layer_type}"
        stage = (vp_stage or 0) * self._pp + (self._stage if pp_rank is None else pp_rank)
        return sum(self._sizes[:stage])
