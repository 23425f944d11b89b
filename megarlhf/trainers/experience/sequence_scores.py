"""Score of a sequence from the reward model's scores of its tokens.

Legend: B rows and S columns of a micro-batch, X = B x S; K sequences, T their averaged tokens, R the most of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarlhf.parallel.micro_batch import MicroBatchLayout, TokenSpans


def sequence_scores(scores_BS1: Tensor, layout: MicroBatchLayout, averaged: TokenSpans | None) -> Tensor:
    """[K]: score at the last token of each sequence, or the mean over its tokens on the spans `averaged`, at least
    one."""
    scores_X = scores_BS1.flatten()
    if averaged is None:
        return scores_X[layout.ends_K.to(scores_X.device)]
    positions_T, counts_K = layout.index_R(averaged), averaged.count_N[layout.sequences_K]
    ends_K = counts_K.cumsum(0) - 1
    back_R = torch.arange(int(counts_K.max()) if len(counts_K) else 0)
    inside_KR = back_R < counts_K[:, None]
    positions_KR = positions_T[torch.where(inside_KR, ends_K[:, None] - back_R, ends_K[:, None])]
    scores_KR = scores_X[positions_KR.to(scores_X.device)] * inside_KR.to(scores_X.device)
    return scores_KR.sum(1) / counts_K.to(scores_KR)
