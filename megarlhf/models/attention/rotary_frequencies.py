"""Scaled rotary frequencies. `architectures/rope.py` reads the scalings from config.json.

Legend: D half the channels of a head that are turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megarlhf.architectures.architecture import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeScaling,
    YarnRope,
)


def scaled_frequencies(inverse_frequencies_D: Tensor, theta: float, rope: RopeScaling) -> Tensor:
    """Apply a scaling to the unscaled frequencies, in radians per position.

    The operations are in the order of transformers and vLLM. An angle is a frequency times a position, so at position
    100 000 the last bit of a frequency is in the angle's third digit.

    Shapes:  [D] -> [D]
    Source:  transformers' `modeling_rope_utils.py`, and the papers named below
    """
    return _SCALED[type(rope)](inverse_frequencies_D, theta, rope)


def attention_factor(rope: RopeScaling | None) -> float:
    """Factor of cosines and sines. Attention scores are multiplied by its square."""
    return rope.attention_factor if isinstance(rope, YarnRope | LongRope) else 1.0


def _linear(inverse_frequencies_D: Tensor, theta: float, rope: LinearRope) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return inverse_frequencies_D / rope.factor


def _dynamic(inverse_frequencies_D: Tensor, theta: float, rope: DynamicRope) -> Tensor:
    """No scaling: it would begin behind `max_positions`, and no sequence is longer."""
    return inverse_frequencies_D


def _yarn(inverse_frequencies_D: Tensor, theta: float, rope: YarnRope) -> Tensor:
    """Divide the frequency by the factor for channels that turn few times over the original length, keep it for
    channels that turn often, blend in between (Peng et al. 2023, section 3.2)."""
    channels = 2 * len(inverse_frequencies_D)

    def channel_of(turns: float) -> float:
        """The channel that makes this many turns over the original length."""
        return channels * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    if low == high:
        high += 0.001
    index_D = torch.arange(channels // 2, dtype=torch.float32, device=inverse_frequencies_D.device)
    kept_D = 1 - ((index_D - low) / (high - low)).clamp(0, 1)
    wavelengths_D = _wavelengths(inverse_frequencies_D, theta)
    return 1.0 / (rope.factor * wavelengths_D) * (1 - kept_D) + 1.0 / wavelengths_D * kept_D


def _longrope(inverse_frequencies_D: Tensor, theta: float, rope: LongRope) -> Tensor:
    """Divide each frequency by its own short factor (Ding et al. 2024)."""
    divisors_D = torch.tensor(rope.short_factor, dtype=torch.float32, device=inverse_frequencies_D.device)
    return 1.0 / (divisors_D * _wavelengths(inverse_frequencies_D, theta))


def _llama3(inverse_frequencies_D: Tensor, theta: float, rope: Llama3Rope) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, blend in between (Llama 3.1's released code)."""
    turns_D = rope.original_max_positions * inverse_frequencies_D / (2 * math.pi)
    blend_D = (turns_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_D = blend_D.clamp(0.0, 1.0)
    return inverse_frequencies_D * (blend_D + (1.0 - blend_D) / rope.factor)


def _wavelengths(inverse_frequencies_D: Tensor, theta: float) -> Tensor:
    """Unscaled wavelengths, divided by 2 pi."""
    channels = 2 * len(inverse_frequencies_D)
    even_D = torch.arange(0, channels, 2, dtype=torch.float32, device=inverse_frequencies_D.device)
    return theta ** (even_D / channels)


_SCALED: Mapping[type, Callable[[Tensor, float, Any], Tensor]] = {
    LinearRope: _linear,
    DynamicRope: _dynamic,
    YarnRope: _yarn,
    LongRope: _longrope,
    Llama3Rope: _llama3,
}
