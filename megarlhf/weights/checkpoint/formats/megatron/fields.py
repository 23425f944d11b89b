"""Decisions on every field of Megatron-Core's `TransformerConfig`, up to 0.20: read, refused, or neutral.

Megatron-LM copies each field from the argument of the same name, but for those in `READ_AS`
(megatron/training/argument_utils.py, core_transformer_config_from_args). A test fails when the installed Megatron-Core
has a field that is not decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from megarlhf.weights.checkpoint.formats.megatron.infer import ARGUMENTS
from megarlhf.weights.checkpoint.formats.megatron.unsupported import SUPPORTED

READ_AS: Mapping[str, str] = MappingProxyType(
    {
        "activation_func": "swiglu",
        "gated_linear_unit": "swiglu",
        "bias_activation_fusion": "bias_gelu_fusion",
        "num_moe_experts": "num_experts",
        "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
        "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    }
)
"""Fields that Megatron-LM makes of an argument of another name, which is read."""

_LAYOUT = frozenset(
    (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("expert_model_parallel_size", "pipeline_model_parallel_layout", "transformer_impl", "moe_grouped_gemm"),
    )
)
"""Fields that say how the run was cut, and which of Megatron's specs it had."""

NEUTRAL = frozenset(
    name
    for line in """
    # Numbers of parts that are refused whole: multi-token prediction, MuP, mHC, other attention, shared experts.
    dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset
    dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_use_sparse_loss dsa_kernel_backend
    experimental_attention_variant_loss_scale_func gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute
    gdp_num_householder linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
    mamba_training_ssm_states_dtype mhc_init_gating_factor mhc_num_residual_streams mhc_recompute_layer_num
    mhc_sinkhorn_iterations moe_router_bias_update_rate moe_router_quantile_balancing_ema moe_shared_expert_gate
    moe_shared_expert_overlap mtp_detach_heads mtp_grad_scale_func mtp_hsm mtp_hybrid_override_pattern
    mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim
    mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult use_grouped_gemm_for_shared_expert
    use_mamba_mem_eff_path
    # Training alone: initial values, losses, dropout, noise, clipping, capacity of experts.
    attention_dropout calculate_per_token_loss cross_entropy_fusion_impl cross_entropy_loss_fusion
    embedding_init_method embedding_init_method_std finalize_model_grads_func grad_scale_func grad_sync_func
    hidden_dropout init_method init_method_std init_model_with_meta_device log_max_attention_logit moe_aux_loss_coeff
    moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_grad_scale_func moe_input_jitter_eps
    moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy moe_token_dropping
    moe_z_loss_coeff no_sync_func output_layer_init_method param_sync_func perform_initialization qk_clip
    qk_clip_alpha qk_clip_threshold use_cpu_initialization
    # Precision.
    activation_func_fp8_input_store apply_query_key_layer_scaling attention_softmax_in_fp32 autocast_dtype bf16
    disable_bf16_reduced_precision_matmul enable_autocast first_last_layers_bf16 fp16 fp32_residual_connection fp4
    fp4_param fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len
    fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param
    fp8_quantizer_factory fp8_recipe fp8_wgrad kitchen_attention_backend moe_combine_bwd_dtype moe_dispatch_fwd_dtype
    moe_router_dtype moe_router_padding_for_fp8 moe_router_padding_for_quantization num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 params_dtype pipeline_dtype quant_recipe tp_only_amax_red use_kitchen
    use_kitchen_attention
    # Generation by Megatron.
    batch_invariant_backend batch_invariant_mode flash_decode inference_cuda_graph_scope
    inference_disable_triton_nvls_kernels inference_fuse_tp_communication inference_grouped_gemm_backend
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_rng_tracker
    inference_sampling_seed mlp_chunks_for_prefill moe_enable_routing_replay nccl_all_reduce_for_prefill
    symmetric_ar_type use_inference_optimized_layers
    # Parallelism, and what is stored where.
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split async_tensor_model_parallel_allreduce
    barrier_with_L1_time batch_p2p_comm batch_p2p_sync context_parallel_size cp_comm_type deallocate_pipeline_outputs
    ep_overlap_early_attn_memory_release expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
    expert_tensor_parallel_size gtp_remat_opt_in_modules gtp_weight_remat_size hetereogenous_dist_checkpoint
    hierarchical_context_parallel_sizes high_priority_a2a_comm_stream hybrid_context_parallel
    max_seqlen_per_dp_cp_rank moe_extended_tp moe_single_grouped_bias moe_single_grouped_weight moe_use_grouped_tensor
    overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm overlap_p2p_comm
    overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend sequence_parallel
    tensor_parallel_num_weight_shards tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
    tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_ring_exchange_p2p
    variable_seq_lengths
    # Memory and speed.
    _cpu_offloading_context activation_offload_fraction apply_rope_fusion attention_backend bias_dropout_fusion
    clone_scatter_output_in_embedding config_logger_dir cpu_offloading cpu_offloading_activations
    cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers
    cpu_offloading_weights cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope
    cuda_graph_use_single_mempool cuda_graph_warmup_steps defer_embedding_wgrad_compute delay_offload_until_cuda_graph
    delay_wgrad_compute delta_offload_bytes_across_pp_ranks deterministic_mode disable_parameter_transpose_cache
    distribute_saved_activations enable_cuda_graph external_cuda_graph fine_grained_activation_offloading
    fine_grained_offloading_max_inflight_offloads flash_attention_version fused_residual_rmsnorm fused_single_qkv_rope
    gradient_accumulation_fusion masked_softmax_fusion memory_efficient_layer_norm microbatch_group_size_per_vp_stage
    min_offloaded_tensor_size mlp_chunks_for_training moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend
    moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute
    moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_fusion moe_token_dispatcher_type moe_use_legacy_grouped_gemm
    num_microbatches_with_partial_activation_checkpoints offload_modules persist_layer_norm recompute_granularity
    recompute_method recompute_modules recompute_num_layers test_mode timers use_fused_weighted_squared_relu
    use_grouped_gemm_for_dense_mlp use_te_activation_func use_te_rng_tracker use_transformer_engine_op_fuser
    wgrad_deferral_limit
    """.splitlines()
    if not line.lstrip().startswith("#")
    for name in line.split()
)
"""Fields that leave what a trained model computes as it is."""

DECIDING = frozenset(SUPPORTED) | {argument for arguments in ARGUMENTS.values() for argument in arguments}
"""Arguments that say what the model computes."""


def decision(field: str) -> Literal["read", "refused", "neutral"] | None:
    """Decision on a field of `TransformerConfig`; `refused`: but for the values that a family of ours has."""
    if field in SUPPORTED:
        return "refused"
    if field in DECIDING or field in READ_AS or field in _LAYOUT:
        return "read"
    return "neutral" if field in NEUTRAL else None
