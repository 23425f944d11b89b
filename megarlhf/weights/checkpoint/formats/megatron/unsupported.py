"""Arguments of Megatron-LM that change what a model computes, and the values that a family of ours has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Args = Mapping[str, Any]


def _off(value: Any) -> bool:
    return not value


def _none_or_one(value: Any) -> bool:
    """Whether a value is absent, 1, or 1 for each layer."""
    return value is None or value == 1 or (isinstance(value, list) and set(value) == {1})


def _among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _losses_alone(value: Any) -> bool:
    """Whether the router's balance, a name or a list of names, is a matter of losses."""
    names = value if isinstance(value, list | tuple) else [value]
    return all(name in (None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss") for name in names)


def _is_causal_window(value: Any) -> bool:
    """Whether a window is absent, or (tokens to the left, 0)."""
    return value is None or (isinstance(value, list | tuple) and len(value) == 2 and value[1] == 0 <= value[0])


SUPPORTED: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "position_embedding_type": _among(None, "rope", "learned_absolute"),
        "normalization": _among(None, "RMSNorm", "LayerNorm"),
        "rotary_interleaved": _off,
        "rope_scaling": lambda value: not value or isinstance(value, dict),
        "rotary_seq_len_interpolation_factor": _none_or_one,
        "no_rope_freq": _off,
        "window_attn_skip_freq": _off,
        "window_size": _is_causal_window,
        "apply_layernorm_1p": _off,
        "apply_residual_connection_post_layernorm": _off,
        "squared_relu": _off,
        "quick_geglu": _off,
        "geglu": _off,
        "openai_gelu": lambda value: True,
        "onnx_safe": _off,
        "activation_func_clamp_value": _among(None),
        "glu_linear_offset": _off,
        "layernorm_zero_centered_gamma": _off,
        "qk_l2_norm": _off,
        "multi_latent_attention": _off,
        "attention_output_gate": _off,
        "experimental_attention_variant": _off,
        "linear_attention_freq": _off,
        "mrope_section": _off,
        "softmax_scale": _among(None),
        "softmax_type": _among(None, "vanilla"),
        "mtp_num_layers": _off,
        "is_hybrid_model": _off,
        "hybrid_override_pattern": _off,
        "hybrid_layer_pattern": _off,
        "heterogeneous_block_specs": _off,
        "heterogeneous_layers_config_path": _off,
        "heterogeneous_layers_config_encoded_json": _off,
        "moe_layer_freq": _none_or_one,
        "moe_shared_expert_intermediate_size": _off,
        "moe_router_score_function": _among(None, "softmax"),
        "moe_router_enable_expert_bias": _off,
        "moe_router_topk_scaling_factor": _none_or_one,
        "moe_router_num_groups": _off,
        "moe_router_group_topk": _off,
        "moe_router_topk_limited_devices": _off,
        "moe_router_force_load_balancing": _off,
        # Others (sinkhorn, quantile_balancing) choose by other numbers than the probabilities, after training too.
        "moe_router_load_balancing_type": _losses_alone,
        "moe_router_force_biased": _among(None),
        "moe_apply_probs_on_input": _off,
        "moe_latent_size": _off,
        # Rows of gate and up in turns: the tensors have the same shapes.
        "moe_mlp_glu_interleave_size": _among(None),
        "moe_shared_expert_glu_interleave_size": _among(None),
        "use_mup": _off,
        "enable_mhc_connections": _off,
        "encoder_num_layers": lambda value: True,
    }
)
"""Arguments that change what a trained model computes, and the values that a family of ours has. Not here: precision,
and what is meant for training (dropout, the router's jitter, the capacity of experts): `fields.py` decides them."""


def unsupported_args(args: Args) -> list[str]:
    return [key for key, fits in SUPPORTED.items() if key in args and not fits(args[key])]


def refuse_unsupported(args: Args) -> None:
    """Raises: ValueError that names every argument with which Megatron computes what no family does."""
    names = unsupported_args(args)
    if names:
        shown = ", ".join(f"{key} = {args[key]!r}" for key in names)
        raise ValueError(
            f"the checkpoint's args describe a model of no known family: {shown}. Use a checkpoint without "
            "these, or add a family (docs/new-architecture.md)"
        )
