"""What the scalings of rotary frequencies compute; how config.json states them: `architectures/rope.py`.

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
    """The frequencies of a model with this scaling, from those without, in radians per position.

    Written in the order in which transformers and vLLM compute them: an angle is a frequency times a position, and at
    position 100 000 the last bit of a frequency is in its third digit.

    Shapes:  [D] -> [D]
    Source:  transformers' `modeling_rope_utils.py`, and the papers named below
    """
    return _SCALED[type(rope)](inverse_frequencies_D, theta, rope)


def attention_factor(rope: RopeScaling | None) -> float:
    """By what cosines and sines are multiplied, so that scores of attention are by its square."""
    return rope.attention_factor if isinstance(rope, YarnRope | LongRope) else 1.0


def _linear(inverse_frequencies_D: Tensor, theta: float, rope: LinearRope) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return inverse_frequencies_D / rope.factor


def _dynamic(inverse_frequencies_D: Tensor, theta: float, rope: DynamicRope) -> Tensor:
    """Of sequences up to `max_positions`: no scaling, and there are no others."""
    return inverse_frequencies_D


def _yarn(inverse_frequencies_D: Tensor, theta: float, rope: YarnRope) -> Tensor:
    """Divided by the factor where a channel turns seldom over the original length, kept where often, blended between
    (Peng et al. 2023, section 3.2)."""
    channels = 2 * len(inverse_frequencies_D)

    def channel_of(turns: float) -> float:
        """Which turns so often over the original length."""
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
    """Each divided by its own short factor (Ding et al. 2024)."""
    divisors_D = torch.tensor(rope.short_factor, dtype=torch.float32, device=inverse_frequencies_D.device)
    return 1.0 / (divisors_D * _wavelengths(inverse_frequencies_D, theta))


def _llama3(inverse_frequencies_D: Tensor, theta: float, rope: Llama3Rope) -> Tensor:
    """Long wavelengths by the factor, short ones not, blended between (Llama 3.1's released code)."""
    turns_D = rope.original_max_positions * inverse_frequencies_D / (2 * math.pi)
    blend_D = (turns_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_D = blend_D.clamp(0.0, 1.0)
    return inverse_frequencies_D * (blend_D + (1.0 - blend_D) / rope.factor)


def _wavelengths(inverse_frequencies_D: Tensor, theta: float) -> Tensor:
    """Without scaling, over 2 pi."""
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
