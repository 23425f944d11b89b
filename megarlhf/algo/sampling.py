"""Filters for sampling: logits of tokens that may not be drawn become -inf.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def filtered_logits(logits_BV: Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Logits of which only the likely ones are left, first by min_p, then by top_k, then by top_p.

    Shapes:  logits_BV [B, V], after the temperature -> [B, V]
    min_p:   keep tokens of at least min_p x the largest probability (Nguyen et al. 2024)
    top_k:   keep the k most likely, and all that are as likely as the k-th; 0: all
    top_p:   keep the fewest, from the likeliest on, whose probabilities sum to top_p or more, of what is left (nucleus
             sampling, Holtzman et al. 2020); at least one
    Others:  the order is vLLM's
    """
    if min_p > 0:
        log_ratio_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(log_ratio_BV.exp() < min_p, NEVER)
    if 0 < top_k < logits_BV.size(-1):
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, NEVER)
    if top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(-1)
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        dropped_BV = (before_BV >= top_p).scatter(-1, torch.zeros_like(order_BV[:, :1]), False)
        logits_BV = logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), NEVER)
    return logits_BV
