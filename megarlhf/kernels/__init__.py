"""Kernels: log-probs of sampled tokens over a sharded vocabulary; advantages and sums of packed sequences."""

from megarlhf.kernels.dispatch import Backend, linear_token_logprobs, token_logprobs
from megarlhf.kernels.packed import (
    Moments,
    PackedBackend,
    packed_gae,
    packed_moments,
    packed_sums,
    packed_whiten,
)

__all__ = [
    "Backend",
    "Moments",
    "PackedBackend",
    "linear_token_logprobs",
    "packed_gae",
    "packed_moments",
    "packed_sums",
    "packed_whiten",
    "token_logprobs",
]
