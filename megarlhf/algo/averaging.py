"""Weights of tokens in the loss of a mini-batch.

Weights are computed once for the whole mini-batch, from the lengths of all its responses, before it is divided into
micro-batches. So the loss and its gradient do not depend on the division, nor on the number of ranks.

Legend: N responses of the mini-batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant", "bnpo"]

_KINDS = ("token", "sequence", "constant", "bnpo")


def response_weights(
    lengths_N: Tensor,
    kind: Aggregation,
    *,
    constant: int | None = None,
    block: int | None = None,
    count_left_out: bool = False,
) -> Tensor:
    """The weight of each token of each response.

    Shapes:  lengths_N [N] integers: tokens of each response that are trained on, 0 where it is left out -> [N] fp64
    kind:    'token': the mean over all tokens (DAPO, Yu et al. 2025, eq. 8; verl's token-mean; TRL's dapo)
             'sequence': the mean over responses of each one's mean (GRPO, Shao et al. 2024, eq. 3; verl's
             seq-mean-token-mean; TRL's grpo)
             'constant': the mean over responses of each one's sum over `constant`, such as the longest response that
             is allowed (Dr. GRPO, Liu et al. 2025; verl's seq-mean-token-sum-norm; TRL's dr_grpo)
             'bnpo': the mean over blocks of `block` responses, in their order, of each block's mean over tokens (TRL's
             bnpo, where a block is what one forward takes; here it is stated, so that it depends on no layout)
    Note:    responses without a token count in no denominator. The weights of all tokens sum to 1, but for 'constant'
    count_left_out: 'sequence' and 'constant' divide by all responses, those left out too, as TRL's grpo and dr_grpo do
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown aggregation {kind!r}; the known ones are {', '.join(_KINDS)}")
    lengths_N = lengths_N.double()
    present_N = lengths_N > 0
    num_responses = (torch.ones_like(lengths_N) if count_left_out else present_N.double()).sum().clamp(min=1)
    if kind == "token":
        weights_N = 1 / lengths_N.sum().clamp(min=1)
    elif kind == "sequence":
        weights_N = 1 / (num_responses * lengths_N.clamp(min=1))
    elif kind == "constant":
        if not constant or constant < 1:
            raise ValueError(f"the aggregation 'constant' needs a constant of 1 or more, got {constant}")
        weights_N = 1 / (num_responses * constant)
    else:
        if not block or block < 1:
            raise ValueError(f"the aggregation 'bnpo' needs a block of 1 response or more, got {block}")
        sums_B = torch.stack([part_N.sum() for part_N in lengths_N.split(block)])
        sizes_B = torch.tensor([len(part_N) for part_N in lengths_N.split(block)])
        num_blocks = (sums_B > 0).double().sum().clamp(min=1)
        weights_N = 1 / (num_blocks * sums_B.clamp(min=1)).repeat_interleave(sizes_B)
    return torch.where(present_N, weights_N, 0.0)
