"""From a last stage's sharded logits to the log-probs of the tokens that followed.

Legend: B rows, S positions, V vocabulary columns of this rank, T selected tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels import token_logprobs


def next_token_logprobs(
    logits_BSV: Tensor,
    tokens_BS: Tensor,
    mask_BS: Tensor,
    *,
    true_vocab: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy at each masked position t of the token at t + 1.

    Shapes:  logits_BSV [B, S, V], tokens_BS and mask_BS [B, S] -> ([B, S], [B, S]) fp32, 0 elsewhere.
             The last position has no next token: mask_BS[:, -1] is False.
    Cost:    only the masked rows are reduced; a prompt token needs no log-prob.
    """
    labels_BS = tokens_BS.roll(-1, dims=1)
    logprobs_T, entropy_T = token_logprobs(
        logits_BSV[mask_BS],
        labels_BS[mask_BS],
        temperature=temperature,
        true_vocab=true_vocab,
        group=group if group.size() > 1 else None,
    )
    blank_BS = torch.zeros(tokens_BS.shape, dtype=logprobs_T.dtype, device=tokens_BS.device)
    return blank_BS.masked_scatter(mask_BS, logprobs_T), blank_BS.masked_scatter(mask_BS, entropy_T)
