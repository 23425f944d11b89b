"""What a model is, apart from how it is stored: the facts a Hugging Face `config.json` states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """The frequency-dependent rotary scaling of Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """What the code supports of one `model_type`."""

    activations: tuple[str, ...]
    """Values of `hidden_act` that the model code computes."""


MODEL_TYPES: dict[str, ModelType] = {"llama": ModelType(activations=("silu",))}
"""Every `model_type` that `Architecture.from_hf` accepts; `tensor_map.TABLES` has the same keys."""

ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of one model, of any size and layout; hashable."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Channels per head; need not be hidden_size / num_heads."""
    ffn_size: int
    vocab_size: int
    """True vocabulary, without anybody's padding."""
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention's output projection."""
    mlp_bias: bool
    activation: str
    """In Hugging Face's words: silu, gelu_new, gelu, relu."""
    gated_mlp: bool = True
    """silu(gate) x up, instead of one projection and the activation."""
    norm: Literal["rms", "layer"] = "rms"
    """A `layer` norm has a bias."""
    qk_norm: bool = False
    """An RMS norm over each query and key head, before the rotary embedding."""
    positions: Literal["rope", "learned"] = "rope"
    position_offset: int = 0
    """Rows of the learned position table ahead of that of position 0 (OPT: 2). Not counted in max_positions."""
    sliding_window: int | None = None
    """Tokens that a token attends to, itself included; None: the whole past."""
    num_experts: int = 0
    """0: a dense MLP."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    renormalize_experts: bool = True
    """The chosen experts' probabilities are scaled to add up to 1."""

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | Mapping[str, Any]) -> Architecture:
        """The architecture of a Hugging Face directory or of its parsed `config.json`.

        Raises: ValueError on a missing key, or on anything the model code would compute wrongly.
        """
        config = source if isinstance(source, Mapping) else read_config(source)
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"config.json has model_type {model_type!r}; known: {', '.join(sorted(MODEL_TYPES))}. "
                "Use a model of a known type, or add a table to megarlhf/weights/tensor_map"
            )
        _refuse_quantized(config)
        num_heads = _positive(config, "num_attention_heads")
        hidden_size = _positive(config, "hidden_size")
        theta, scaling = _rope(config)
        return cls(
            model_type=model_type,
            num_layers=_positive(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_kv_heads(config, num_heads),
            head_dim=_head_dim(config, hidden_size, num_heads),
            ffn_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            max_positions=_positive(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", False)),
            output_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            activation=_activation(config, model_type),
        )


def read_config(directory: str | PathLike[str]) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a Hugging Face model directory, which has a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the file again from its source") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object; copy it again")
    return config


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json has {key} = {value!r}, expected a positive integer; correct config.json")
    return value


def _kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return num_heads
    num_kv_heads = _positive(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json has num_attention_heads = {num_heads}, not a multiple of num_key_value_heads = "
            f"{num_kv_heads}; correct config.json"
        )
    return num_kv_heads


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"config.json has no head_dim, and hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {num_heads}; add head_dim to config.json"
        )
    return hidden_size // num_heads


def _activation(config: Mapping[str, Any], model_type: str) -> str:
    activation = config.get("hidden_act", "silu")
    known = MODEL_TYPES[model_type].activations
    if activation not in known:
        raise ValueError(
            f"config.json has hidden_act {activation!r}; {model_type} is supported with: {', '.join(known)}"
        )
    return activation


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"config.json has a quantization_config ({method!r}): its weights are not the model's values; "
            "use the checkpoint in bf16, fp16 or fp32"
        )


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Rotary base and scaling: transformers 5 `rope_parameters`, else `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json has rotary parameters {rope!r}, expected an object; correct config.json")
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"config.json has rope type {rope_type!r}; supported: {', '.join(ROPE_TYPES)}. "
            "Use a model with one of these, or with its rotary scaling removed"
        )
    if rope_type == "default":
        return theta, None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if rope.get(key) is None]
    if missing:
        raise ValueError(f"config.json has rope type 'llama3' without {', '.join(missing)}; add them")
    factor, low, high, original = (rope[key] for key in keys)
    scaling = Llama3Rope(
        factor=float(factor),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_positions=int(original),
    )
    return theta, scaling
