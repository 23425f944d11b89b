"""The load-balancing loss of a mixture of experts.

Legend: T tokens, K sequences, E experts. `belongs` is the sequence of each token, [T] int64 with K for padding; or,
where sequences share tokens, a table [T, K] of ones and zeros in the values' dtype.
"""

from __future__ import annotations

from torch import Tensor


def count_choices(chosen_TE: Tensor, belongs: Tensor, num_sequences: int) -> Tensor:
    """Count the tokens of each sequence that have chosen each expert.

    Shapes:  chosen_TE [T, E] bool, belongs [T] or [T, K] as above -> [K, E] fp32, whole numbers
    """
    return _sums(chosen_TE.float(), belongs, num_sequences)


def sequence_balance(scores_TE: Tensor, counts_KE: Tensor, belongs: Tensor, experts_per_token: int) -> Tensor:
    """The sum over sequences of E x sum_e f_e P_e: of a sequence of T tokens f_e = (tokens that have chosen e) / T, and
    P_e the mean over its tokens of e's probability among all experts. A perfectly balanced sequence has
    `experts_per_token`.

    `counts_KE` are of whole sequences. If the tokens are only a part of them, so is the result, since it is linear in
    the probabilities. No gradient flows through the counts.

    Shapes:  scores_TE [T, E] fp32, counts_KE [K, E] fp32, belongs [T] or [T, K] as above -> a scalar
    Source:  Fedus et al. 2021 (Switch Transformers), equations 4 to 6, in Hugging Face's scale for several experts a
             token (f_e adds up to `experts_per_token`, not to 1); over a sequence as in DeepSeek-V3, equations 17 to 20
    """
    num_sequences, num_experts = counts_KE.shape
    tokens_K1 = counts_KE.sum(1, keepdim=True) / experts_per_token
    weights_KE = num_experts * counts_KE / tokens_K1.clamp(min=1.0).square()
    return (weights_KE * _sums(scores_TE, belongs, num_sequences)).sum()


def _sums(values_TE: Tensor, belongs: Tensor, num_sequences: int) -> Tensor:
    """[T, E] -> [K, E], over the tokens of each sequence."""
    if belongs.ndim == 2:
        return belongs.t() @ values_TE
    zeros_KE = values_TE.new_zeros(num_sequences + 1, values_TE.size(1))
    return zeros_KE.index_add(0, belongs, values_TE)[:num_sequences]
