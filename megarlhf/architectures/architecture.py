"""The architecture of a model, apart from how it is stored: the facts that a Hugging Face `config.json` states."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """The frequency-dependent rotary scaling of Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """Positions divided by a factor (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicRope:
    """NTK scaling by the length of the sequence (`rope_type: dynamic`): none up to `max_positions`, and longer
    sequences are refused (`architectures/rope.py` says why)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnRope:
    """Frequencies divided by the factor, kept, or between, by their turns over the original length (Peng et al. 2023;
    `rope_type: yarn`)."""

    factor: float
    original_max_positions: int
    beta_fast: float
    """Turns from which on a frequency is kept."""
    beta_slow: float
    """Turns up to which it is divided."""
    attention_factor: float
    """Factor of cosines and sines."""
    truncate: bool
    """The channels of the two bounds are rounded, outwards."""


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """A divisor for each frequency (Ding et al. 2024; `rope_type: longrope`): the short ones up to the original
    length, and longer sequences are refused (`architectures/rope.py` says why)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    """Factor of cosines and sines."""


ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Activations that the models compute (`models/settings.py`), by Hugging Face's names."""

RopeScaling = Llama3Rope | LinearRope | DynamicRope | YarnRope | LongRope


@dataclass(frozen=True, kw_only=True)
class AdapterTarget:
    """A linear layer that has an adapter, in every decoder layer or in some."""

    module: str
    """Hugging Face's name inside a decoder layer: `self_attn.q_proj`; with `{expert}` where each expert has one."""
    layers: tuple[int, ...] | None = None
    """Decoder layers that have it; None: all."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank additions to linear layers: W x + scale B (A x), A [rank, input], B [output, rank].

    Source: Hu et al., LoRA, 2021; with `rslora` Kalajdzievski, 2023.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[AdapterTarget, ...]

    @property
    def scale(self) -> float:
        """alpha / rank; with `rslora` alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


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
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention's output projection."""
    mlp_bias: bool
    activation: str
    """One of `ACTIVATIONS`."""
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
    rotary_share: float = 1.0
    """Share of a head's channels that the rotary embedding rotates: the first ones."""

    adapter: Adapter | None = None
    """LoRA adapter of the model: its A and B are tensors of the model like any other. No config.json states it."""

    @property
    def base(self) -> Architecture:
        """The model without its adapter."""
        return self if self.adapter is None else replace(self, adapter=None)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are turned."""
        return int(self.head_dim * self.rotary_share)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that is the same to us, to transformers and to vLLM."""
        if isinstance(self.rope_scaling, LongRope):
            return min(self.max_positions, self.rope_scaling.original_max_positions)
        return self.max_positions

    @property
    def limit_of_sequences(self) -> str:
        """The setting behind `longest_sequence`, in words that end with the number."""
        if self.longest_sequence < self.max_positions:
            return (
                "rope type longrope, which transformers changes at its original_max_position_embeddings sequence by "
                f"sequence and vLLM for the whole engine: {self.longest_sequence}"
            )
        if isinstance(self.rope_scaling, DynamicRope):
            return (
                "rope type dynamic, which beyond max_position_embeddings transformers changes with every token and "
                f"vLLM does not compute: {self.longest_sequence}"
            )
        return f"max_position_embeddings = {self.longest_sequence}"
