"""Log-probs and entropy of sampled tokens over a vocabulary sharded by tensor parallelism."""

from megarlhf.kernels.dispatch import Backend, linear_token_logprobs, token_logprobs

__all__ = ["Backend", "linear_token_logprobs", "token_logprobs"]
