"""Log-probs and entropy of sampled tokens over a vocabulary sharded by tensor parallelism."""

from megarlhf.kernels.reference import token_logprobs

__all__ = ["token_logprobs"]
