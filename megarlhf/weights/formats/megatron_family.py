"""The family and the sizes of a model, from the arguments that Megatron-LM stored: switches, no names of families."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megarlhf.weights.architecture import Architecture
from megarlhf.weights.config_spec import Llama3Rope

Args = Mapping[str, Any]

_log = logging.getLogger(__name__)


def infer(args: Args, family: str) -> Architecture:
    """The architecture of this family with the arguments' sizes and switches.

    Raises: ValueError when an argument is missing.
    """
    _require(args)
    rope = _positions(args) == "rope"
    heads, hidden = args["num_attention_heads"], args["hidden_size"]
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    bias = _bias(args)
    num_experts = args.get("num_experts") or 0
    ffn = args.get("ffn_hidden_size") or 4 * hidden
    expert_ffn = (args.get("moe_ffn_hidden_size") or ffn) if num_experts else 0
    window = args.get("window_size")
    return Architecture(
        model_type=family,
        num_layers=args["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=groups or heads,
        head_dim=args.get("kv_channels") or hidden // heads,
        ffn_size=expert_ffn if family == "mixtral" else ffn,
        vocab_size=_vocab_size(args),
        max_positions=args.get("max_position_embeddings") or args["seq_length"],
        norm_eps=float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        rope_theta=float(args.get("rotary_base") or 10000.0) if rope else 0.0,
        rope_scaling=_rope_scaling(args) if rope else None,
        tied_embeddings=not args.get("untie_embeddings_and_output_weights", False),
        qkv_bias=bias or bool(args.get("add_qkv_bias")),
        output_bias=bias,
        mlp_bias=bias,
        activation=_activation(args),
        gated_mlp=bool(args.get("swiglu")),
        norm="rms" if args.get("normalization") == "RMSNorm" else "layer",
        qk_norm=bool(args.get("qk_layernorm")),
        positions="rope" if rope else "learned",
        sliding_window=None if window is None else window[0] + 1,
        num_experts=num_experts,
        experts_per_token=args.get("moe_router_topk", 2) if num_experts else 0,
        expert_ffn_size=expert_ffn,
        renormalize_experts=not args.get("moe_router_pre_softmax") if num_experts else True,
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _require(args: Args) -> None:
    missing = [key for key in ("num_layers", "hidden_size", "num_attention_heads") if not _is_size(args.get(key))]
    if not args.get("max_position_embeddings") and not args.get("seq_length"):
        missing.append("max_position_embeddings")
    if not args.get("vocab_size") and not args.get("padded_vocab_size"):
        missing.append("padded_vocab_size")
    if missing:
        raise ValueError(
            f"the checkpoint's args lack {', '.join(missing)}, which describe the model; name a Hugging Face directory "
            "with its config.json"
        )


def _positions(args: Args) -> str:
    """`position_embedding_type`, or what runs before that argument said."""
    kind = args.get("position_embedding_type")
    if kind is None:
        kind = "rope" if args.get("use_rotary_position_embeddings") else "learned_absolute"
    return str(kind)


def _bias(args: Args) -> bool:
    if args.get("add_bias_linear") is not None:
        return bool(args["add_bias_linear"])
    return not args.get("disable_bias_linear", False)


def _activation(args: Args) -> str:
    if args.get("swiglu"):
        return "silu"
    return "gelu_new" if args.get("bias_gelu_fusion", True) or args.get("openai_gelu") else "gelu"


def _rope_scaling(args: Args) -> Llama3Rope | None:
    if not args.get("use_rope_scaling"):
        return None
    factor = float(args.get("rope_scaling_factor") or 8.0)
    return Llama3Rope(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def _vocab_size(args: Args) -> int:
    stated, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if stated:
        if padded and stated > padded:
            raise ValueError(
                f"the checkpoint's args have vocab_size = {stated}, more than padded_vocab_size = {padded}; correct "
                "them, or name a Hugging Face directory with the model's config.json"
            )
        return int(stated)
    assert padded, "_require saw to it"
    _log.warning(
        "the checkpoint's args state no vocab_size: its %d padded rows are taken for the vocabulary; a Hugging Face "
        "directory with the model's config.json would say how many are real",
        padded,
    )
    return int(padded)


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    """Nothing, 1, or 1 for each layer."""
    return value is None or value == 1 or (isinstance(value, list) and set(value) == {1})


def _among(*known: Any) -> Callable[[Any], bool]:
    return lambda value: value in known


_UNDERSTOOD: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "position_embedding_type": _among(None, "rope", "learned_absolute"),
        "normalization": _among(None, "RMSNorm", "LayerNorm"),
        "rotary_percent": _one,
        "rotary_interleaved": _off,
        "rotary_seq_len_interpolation_factor": _one,
        "no_rope_freq": _off,
        "window_attn_skip_freq": _off,
        "window_size": lambda value: value is None or (value[1] == 0 and value[0] >= 0),
        "apply_layernorm_1p": _off,
        "apply_residual_connection_post_layernorm": _off,
        "squared_relu": _off,
        "quick_geglu": _off,
        "geglu": _off,
        "openai_gelu": lambda value: True,
        "onnx_safe": _off,
        "multi_latent_attention": _off,
        "attention_output_gate": _off,
        "softmax_type": _among(None, "vanilla"),
        "mtp_num_layers": _off,
        "is_hybrid_model": _off,
        "hybrid_override_pattern": _off,
        "hybrid_layer_pattern": _off,
        "heterogeneous_layers_config_path": _off,
        "heterogeneous_layers_config_encoded_json": _off,
        "moe_layer_freq": _one,
        "moe_shared_expert_intermediate_size": _off,
        "moe_router_score_function": _among(None, "softmax"),
        "moe_router_enable_expert_bias": _off,
        "moe_router_topk_scaling_factor": _one,
        "moe_router_num_groups": _off,
        "moe_latent_size": _off,
        "encoder_num_layers": lambda value: True,
    }
)
"""Arguments that change what a model computes, and the values that a family of ours has."""


def _refuse_unknown(args: Args) -> None:
    wrong = [f"{key} = {args[key]!r}" for key, fits in _UNDERSTOOD.items() if key in args and not fits(args[key])]
    if wrong:
        raise ValueError(
            f"the checkpoint's args describe a model of no known family: {', '.join(wrong)}. Use a checkpoint without "
            "these, or add a family (docs/new-architecture.md)"
        )


_FAMILIES: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "llama": {"decoder": (True,), "qk_layernorm": (False,), "experts": (False,), "window": (False,),
                  "bias": ("none", "all")},
        "mistral": {"decoder": (True,), "qk_layernorm": (False,), "experts": (False,), "bias": ("none",)},
        "qwen2": {"decoder": (True,), "qk_layernorm": (False,), "experts": (False,), "window": (False,),
                  "bias": ("qkv",)},
        "qwen3": {"decoder": (True,), "qk_layernorm": (True,), "experts": (False,), "window": (False,),
                  "bias": ("none", "qkv")},
        "mixtral": {"decoder": (True,), "qk_layernorm": (False,), "experts": (True,), "bias": ("none",),
                    "moe_router_pre_softmax": (False,)},
        "qwen3_moe": {"decoder": (True,), "qk_layernorm": (True,), "experts": (True,), "window": (False,),
                      "bias": ("none", "qkv")},
        "gpt2": {"decoder": (False,), "qk_layernorm": (False,), "experts": (False,), "window": (False,),
                 "bias": ("all",)},
    }
)  # fmt: skip
"""The switches of each family, the first that fits is taken. OPT is not among them: Megatron-LM has no ReLU."""


_WORDS = {
    "decoder": "normalization, position_embedding_type or swiglu",
    "experts": "num_experts",
    "window": "window_size",
    "bias": "add_bias_linear or add_qkv_bias",
}


def family_of(args: Args) -> str:
    """The family whose switches these are.

    Raises: ValueError that names every argument which no family has.
    """
    _refuse_unknown(args)
    norm, positions, gated = args.get("normalization") or "LayerNorm", _positions(args), bool(args.get("swiglu"))
    style = {("RMSNorm", "rope", True): True, ("LayerNorm", "learned_absolute", False): False}
    bias = "all" if _bias(args) else "qkv" if args.get("add_qkv_bias") else "none"
    switches = {
        "decoder": style.get((norm, positions, gated)),
        "qk_layernorm": bool(args.get("qk_layernorm")),
        "experts": bool(args.get("num_experts")),
        "window": args.get("window_size") is not None,
        "bias": bias,
        "moe_router_pre_softmax": bool(args.get("moe_router_pre_softmax")),
    }
    misfits = {
        family: [name for name, values in wanted.items() if switches[name] not in values]
        for family, wanted in _FAMILIES.items()
    }
    for family, names in misfits.items():
        if not names:
            return family
    nearest = min(misfits, key=lambda family: (len(misfits[family]), "experts" in misfits[family]))
    told = {"normalization": norm, "position_embedding_type": positions, "swiglu": gated}
    told |= {"add_bias_linear": bias == "all", "add_qkv_bias": bias != "none"}
    told |= {key: args.get(key) for key in ("qk_layernorm", "num_experts", "window_size", "moe_router_pre_softmax")}
    shown = ", ".join(f"{key} = {value!r}" for key, value in told.items())
    raise ValueError(
        f"the checkpoint's args describe a model of no known family: {shown}; the nearest is {nearest}, which differs "
        f"in {', '.join(_WORDS.get(name, name) for name in misfits[nearest])}. Name a Hugging Face directory with the "
        "model's config.json, or add a family (docs/new-architecture.md)"
    )
