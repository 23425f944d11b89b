"""Names and shapes of Megatron-Core's own models, any rank of any layout in one process. Process groups are torch's
fake ones: nothing communicates, but each rank's modules have their true sizes. To be called in a process of its own,
since it initialises Megatron-Core's global state."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarlhf.architectures.architecture import Architecture
from tests.weights.families import architecture


def shapes_of(cases: list[tuple[str, dict[str, Any]]]) -> list[list[dict[str, tuple[int, ...]]]]:
    from megarlhf.parallel.megatron_cpu import megatron_device

    with megatron_device(torch.device("cpu")):
        return [shapes(architecture(name), layout) for name, layout in cases]


def shapes(arch: Architecture, layout: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Every model-parallel rank of a layout, in the order of `MegatronLayout.ranks`."""
    tp, pp, ep = layout.get("tp", 1), layout.get("pp", 1), layout.get("ep", 1)
    ranks = [(stage, e, t) for stage in range(pp) for e in range(ep) for t in range(tp)]
    return [_rank(arch, layout, tp * pp * ep, number, stage) for number, (stage, _, _) in enumerate(ranks)]


def _rank(arch: Architecture, layout: dict[str, Any], world: int, rank: int, stage: int) -> dict[str, tuple[int, ...]]:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        vpp = layout.get("vpp", 1)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.get("tp", 1), pipeline_model_parallel_size=layout.get("pp", 1),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            expert_model_parallel_size=layout.get("ep", 1), expert_tensor_parallel_size=layout.get("tp", 1),
            create_gloo_process_groups=False,
        )  # fmt: skip
        shapes_by_name: dict[str, tuple[int, ...]] = {}
        for chunk in range(vpp):
            first = stage == 0 and chunk == 0
            last = stage == layout.get("pp", 1) - 1 and chunk == vpp - 1
            model = _model(arch, layout, first, last, chunk if vpp > 1 else None)
            prefix = f"model{chunk}." if vpp > 1 else ""
            shapes_by_name |= {prefix + name: tuple(p.shape) for name, p in model.named_parameters()}
        return shapes_by_name
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _config(arch: Architecture, layout: dict[str, Any], chunk: int | None) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages = layout.get("layers_per_stage")
    uneven = {}
    if stages:
        uneven = {"num_layers_in_first_pipeline_stage": stages[0], "num_layers_in_last_pipeline_stage": stages[-1]}
    moe: dict[str, Any] = {}
    if arch.num_experts:
        moe = {
            "num_moe_experts": arch.num_experts, "moe_ffn_hidden_size": arch.expert_ffn_size,
            "expert_model_parallel_size": layout.get("ep", 1), "moe_grouped_gemm": layout.get("experts") == "grouped",
        }  # fmt: skip
    return TransformerConfig(
        num_layers=arch.num_layers, hidden_size=arch.hidden_size, num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads, kv_channels=arch.head_dim, ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm" if arch.norm == "rms" else "LayerNorm", qk_layernorm=arch.qk_norm,
        gated_linear_unit=arch.gated_mlp, activation_func=torch.nn.functional.silu, add_bias_linear=arch.mlp_bias,
        add_qkv_bias=arch.qkv_bias, tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=None if chunk is None else layout["vpp"],
        pipeline_dtype=torch.float32, perform_initialization=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False, **uneven, **moe,
    )  # fmt: skip


def _model(arch: Architecture, layout: dict[str, Any], first: bool, last: bool, chunk: int | None) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import experts

    config, grouped = _config(arch, layout, chunk), layout.get("experts") == "grouped"
    # The library behind grouped experts is a CUDA one, asked for in the constructor, used in forward only.
    with mock.patch.object(experts.gg, "assert_grouped_gemm_is_available"):
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=arch.num_experts or None,
                moe_grouped_gemm=grouped,
                moe_use_legacy_grouped_gemm=grouped,
                qk_layernorm=arch.qk_norm,
                normalization=config.normalization,
            ),
            vocab_size=layout["padded_vocab"],
            max_sequence_length=arch.max_positions + arch.position_offset,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope" if arch.positions == "rope" else "learned_absolute",
            vp_stage=chunk,
        )
