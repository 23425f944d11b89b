"""From a last stage's hidden states to the log-probs of the tokens that followed, and to logits where they are wanted.

Hidden states stand as Megatron has them, position before row: under sequence parallelism each rank holds a stretch of
positions, and the ranks' parts, one after the other, are the whole.

Legend: B rows, S positions (of them S / tp on a rank under sequence parallelism), H hidden, V vocabulary columns of
this rank, K chosen positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels import Backend, linear_token_logprobs
from megarlhf.kernels.matmul import as_matmul_input, matmul_into
from megarlhf.kernels.statistics import working_dtype


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the vocabulary matrix, and how log-probs are made with it."""

    weight_VH: Tensor | None
    """The live parameter; None on a pipeline stage that has no outputs."""
    true_vocab: int
    """Columns of all ranks that are not padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None: this rank has all columns."""
    sequence_parallel: bool = False
    backend: Backend = "auto"
    save_bytes: int = 2**28
    """Memory that holds logits from a forward to its backward."""

    @property
    def tp(self) -> int:
        return 1 if self.group is None else self.group.size()

    def weight(self) -> Tensor:
        """The matrix, on the last stage."""
        assert self.weight_VH is not None, "log-probs are computed on the last pipeline stage only"
        return self.weight_VH


def next_token_logprobs(
    vocabulary: Vocabulary,
    hidden_SBH: Tensor,
    tokens_BS: Tensor,
    mask_BS: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy at each masked position t of the token at t + 1.

    Shapes:  hidden_SBH [S, B, H], or [S / tp, B, H] of this rank under sequence parallelism; tokens_BS and mask_BS
             [B, S] -> ([B, S], [B, S]) fp32, 0 elsewhere; without `return_entropy` the second is 0 everywhere.
             The last position has no next token: mask_BS[:, -1] is False.
    Cost:    only the masked rows are multiplied; a prompt token needs no log-prob. No logits are kept but what
             `save_bytes` allows: see `kernels.linear_token_logprobs`.
    """
    num_rows, length = tokens_BS.shape
    labels_BS = tokens_BS.roll(-1, dims=1)
    results = linear_token_logprobs(
        hidden_SBH.flatten(0, 1),
        vocabulary.weight(),
        labels_BS.t().reshape(-1),
        temperature=temperature,
        true_vocab=vocabulary.true_vocab,
        group=vocabulary.group,
        sequence_parallel=vocabulary.sequence_parallel,
        response_mask=mask_BS.t().reshape(-1),
        save_bytes=vocabulary.save_bytes,
        return_entropy=return_entropy,
        backend=vocabulary.backend,
    )
    logprobs_BS, entropy_BS = (column_T.view(length, num_rows).t() for column_T in results)
    return logprobs_BS, entropy_BS


def logits_at(vocabulary: Vocabulary, hidden_SBH: Tensor, rows_K: Tensor, positions_K: Tensor) -> Tensor:
    """Logits over the whole vocabulary where `rows_K` and `positions_K` point, for sampling and for comparisons.

    Shapes:  hidden_SBH as in `next_token_logprobs`, rows_K and positions_K [K] int64 -> [K, true vocabulary] fp32,
             the same on every rank of the tensor-parallel group. No gradient.
    Memory:  K x padded vocabulary, twice under tensor parallelism: choose few positions.
    """
    with torch.no_grad():
        hidden_KH = _hidden_at(vocabulary, hidden_SBH, rows_K, positions_K)
        weight_VH = vocabulary.weight()
        local_KV = torch.empty(
            len(rows_K), weight_VH.size(0), dtype=working_dtype(hidden_SBH), device=hidden_SBH.device
        )
        matmul_into(local_KV, as_matmul_input(hidden_KH), as_matmul_input(weight_VH).t())
        if vocabulary.tp > 1:
            parts = [torch.empty_like(local_KV) for _ in range(vocabulary.tp)]
            dist.all_gather(parts, local_KV, group=vocabulary.group)
            local_KV = torch.cat(parts, -1)
        return local_KV[:, : vocabulary.true_vocab]


def _hidden_at(vocabulary: Vocabulary, hidden_SBH: Tensor, rows_K: Tensor, positions_K: Tensor) -> Tensor:
    """[K, H]. Under sequence parallelism a position is one rank's: the others add zeros."""
    if vocabulary.group is None or not vocabulary.sequence_parallel:
        return hidden_SBH[positions_K, rows_K]
    here = hidden_SBH.size(0)
    local_K = positions_K - vocabulary.group.rank() * here
    mine_K = (local_K >= 0) & (local_K < here)
    hidden_KH = hidden_SBH[local_K.clamp(0, here - 1), rows_K].masked_fill(~mine_K[:, None], 0.0)
    dist.all_reduce(hidden_KH, group=vocabulary.group)
    return hidden_KH
