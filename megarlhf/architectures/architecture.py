"""What a model is, apart from how it is stored: the facts a Hugging Face `config.json` states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarlhf.architectures.config_spec import Llama3Rope, read_facts, write_facts

if TYPE_CHECKING:
    from megarlhf.architectures.table import Family


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
    """Rotary base; 0 without a rotary embedding."""
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
        family = _family(config.get("model_type"))
        return cls(model_type=family.model_type, **read_facts(config, family.config))


def hf_config(arch: Architecture, head: Literal["lm", "scalar"] = "lm") -> dict[str, Any]:
    """A `config.json` that `Architecture.from_hf` reads back to `arch`, for a model that has none at hand.

    An architecture knows no token ids: they are null, so that nobody takes a library's default for the model's own.

    Raises: ValueError when the model type has no way to state `arch`.
    """
    family = _family(arch.model_type)
    config: dict[str, Any] = {
        "architectures": [hf_class(arch.model_type, head)],
        "model_type": arch.model_type,
        **write_facts(vars(arch), family.config),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if head == "scalar":
        config["num_labels"] = 1
    again = Architecture.from_hf(config)
    different = [f.name for f in fields(arch) if getattr(again, f.name) != getattr(arch, f.name)]
    if different:
        raise ValueError(
            f"a config.json of model_type {arch.model_type!r} cannot say "
            f"{', '.join(f'{name} = {getattr(arch, name)!r}' for name in different)}; use another model_type"
        )
    return config


def hf_class(model_type: str, head: Literal["lm", "scalar"]) -> str:
    """transformers' class of the model with this head, as `architectures` in config.json names it."""
    config = _family(model_type).config
    return config.lm_class if head == "lm" else config.scalar_class


def read_config(directory: str | PathLike[str]) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a Hugging Face model directory, which has a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the file again from its source") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object; copy it again")
    return config


def _family(model_type: Any) -> Family:
    from megarlhf.architectures.families import FAMILIES  # late: tables are functions of an Architecture

    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json has model_type {model_type!r}; known: {', '.join(sorted(FAMILIES))}. "
            "Use a model of a known type, or add a family (docs/new-architecture.md)"
        )
    return FAMILIES[model_type]
