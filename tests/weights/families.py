"""Tiny configurations of every family, made by transformers."""

from __future__ import annotations

from typing import Any

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf

_SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 48, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0 + 0.25 * n for n in range(4)],
    "long_factor": [2.0 + 0.5 * n for n in range(4)], "partial_rotary_factor": 0.5,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SMALL, "rms_norm_eps": 1e-5}),
    "llama_biases": ("LlamaConfig", {**_SMALL, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}),
    "llama_yarn": ("LlamaConfig", {**_SMALL, "rope_parameters": {**_YARN, "beta_fast": 8.0, "truncate": False}}),
    "llama_linear": ("LlamaConfig", {**_SMALL, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama_dynamic": ("LlamaConfig", {**_SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "mistral": ("MistralConfig", {**_SMALL, "sliding_window": 7}),
    "mistral_whole": ("MistralConfig", {**_SMALL, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen2_tied": ("Qwen2Config", {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SMALL, "head_dim": 32}),
    "qwen3_biases": ("Qwen3Config", {**_SMALL, "head_dim": 32, "attention_bias": True}),
    "qwen3_tied": ("Qwen3Config", {**_SMALL, "head_dim": 32, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {
        "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 48, "vocab_size": 100, "bos_token_id": 1,
        "eos_token_id": 2}),
    "opt": ("OPTConfig", {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 96,
        "max_position_embeddings": 48, "vocab_size": 100}),
    "mixtral": ("MixtralConfig", {**_SMALL, **_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SMALL, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 40, "head_dim": 32, "norm_topk_prob": True},
    ),
    "phi3": ("Phi3Config", {**_SMALL, "sliding_window": 7, "pad_token_id": 0}),
    "phi3_longrope": (
        "Phi3Config",
        {**_SMALL, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 24, "pad_token_id": 0},
    ),
}  # fmt: skip
"""Name -> (transformers' configuration class, its arguments)."""


def config(name: str, **changes: Any) -> Any:
    import transformers

    kind, settings = CONFIGS[name]
    return getattr(transformers, kind)(**{**settings, **changes})


def architecture(name: str, **changes: Any) -> Architecture:
    return architecture_from_hf(config(name, **changes).to_dict())
