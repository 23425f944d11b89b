"""Score of a sequence from the reward model's scores of its tokens.

Legend: B rows and S columns of a micro-batch, X = B x S; K sequences, R tokens of their longest response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.parallel.micro_batch import MicroBatchLayout


def sequence_scores(scores_BS1: Tensor, layout: MicroBatchLayout, response_lengths_K: Tensor | None) -> Tensor:
    """[K]: score at the last token of each sequence, or, given the responses' lengths (at least 1), the mean over the
    response's tokens."""
    scores_X = scores_BS1.flatten()
    ends_K = layout.ends_K.to(scores_X.device)
    if response_lengths_K is None:
        return scores_X[ends_K]
    lengths_K = response_lengths_K.to(scores_X.device)
    back_R = torch.arange(int(lengths_K.max()) if len(lengths_K) else 0, device=scores_X.device)
    inside_KR = back_R < lengths_K[:, None]
    scores_KR = scores_X[torch.where(inside_KR, ends_K[:, None] - back_R, ends_K[:, None])]
    return (scores_KR * inside_KR).sum(1) / lengths_K.to(scores_KR.dtype)
