"""Log-probs of next tokens, and logits, from the hidden states of the last stage.

Hidden states have Megatron's order of axes, position before row. Under sequence parallelism each rank holds a
contiguous part of the positions. Under context parallelism a rank has only its share of the positions; its log-probs
are gathered, so that results are of whole rows.

Legend: B rows, S positions (S' this rank's share of them, S' / tp on a rank under sequence parallelism), H hidden, V
vocabulary columns of this rank, K chosen positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels import Backend, linear_token_logprobs
from megarlhf.kernels.matmul import as_matmul_input, matmul_into
from megarlhf.kernels.statistics import working_dtype
from megarlhf.parallel.context import ContextShare
from megarlhf.parallel.micro_batch import MicroBatch


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the vocabulary matrix, and options for log-probs."""

    weight_VH: Tensor | None
    """The live parameter; None on a pipeline stage without outputs."""
    true_vocab: int
    """Columns of all ranks, without padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None: this rank has all columns."""
    sequence_parallel: bool = False
    backend: Backend = "auto"
    save_bytes: int = 2**28
    """Memory for logits that are kept from a forward to its backward."""

    @property
    def tp(self) -> int:
        return 1 if self.group is None else self.group.size()

    def weight(self) -> Tensor:
        """The matrix, on the last stage."""
        assert self.weight_VH is not None, "log-probs are computed on the last pipeline stage only"
        return self.weight_VH


def batch_logprobs(
    vocabulary: Vocabulary,
    hidden_SBH: Tensor,
    batch: MicroBatch,
    mask_BS: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """`next_token_logprobs` of a micro-batch's tokens, with the micro-batch's predictors and context share."""
    return next_token_logprobs(
        vocabulary,
        hidden_SBH,
        batch.tokens_BS,
        mask_BS,
        predictors_S=batch.predictors_S,
        share=batch.share,
        temperature=temperature,
        return_entropy=return_entropy,
    )


def next_token_logprobs(
    vocabulary: Vocabulary,
    hidden_SBH: Tensor,
    tokens_BS: Tensor,
    mask_BS: Tensor,
    *,
    predictors_S: Tensor | None = None,
    share: ContextShare | None = None,
    temperature: float = 1.0,
    return_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each masked token, and the entropy of its distribution.

    Shapes:  hidden_SBH [S', B, H], or [S' / tp, B, H] of this rank under sequence parallelism; tokens_BS and mask_BS
             [B, S] -> ([B, S], [B, S]) fp32, 0 elsewhere. Without `return_entropy` the second is 0 everywhere.
             share: of the forward that computed the hidden states (`MicroBatch.share`)
             predictors_S [S] int64: for each column the column whose hidden state predicts it, for a row where a column
             may predict several (`MicroBatch.predictors_S`); None: the column to its left. Nothing predicts the first
             column: mask_BS[:, 0] is False.
    Cost:    only masked rows are multiplied; prompt tokens need no log-prob. Logits are kept only within `save_bytes`:
             see `kernels.linear_token_logprobs`.
    """
    num_rows = tokens_BS.size(0)
    if predictors_S is None:  # move labels and mask to their hidden states
        tokens_BS, mask_BS = tokens_BS.roll(-1, dims=1), mask_BS.roll(-1, dims=1)
    else:
        assert num_rows == 1, f"predictors are for one packed row, got {num_rows} rows"
        assert share is None, "under context parallelism sequences share no prefix"
    if share is not None:  # after the roll over the whole row, since the next token may be another rank's
        tokens_BS, mask_BS = share.cut(tokens_BS), share.cut(mask_BS)
    results = linear_token_logprobs(
        hidden_SBH.flatten(0, 1),
        vocabulary.weight(),
        tokens_BS.t().reshape(-1),
        temperature=temperature,
        true_vocab=vocabulary.true_vocab,
        group=vocabulary.group,
        sequence_parallel=vocabulary.sequence_parallel,
        response_mask=mask_BS.t().reshape(-1),
        rows_T=predictors_S,
        save_bytes=vocabulary.save_bytes,
        return_entropy=return_entropy,
        backend=vocabulary.backend,
    )
    both_2BS = torch.stack([column_T.view(-1, num_rows).t() for column_T in results[: 1 + return_entropy]])
    if share is not None:
        both_2BS = share.whole(both_2BS)
    if predictors_S is None:
        both_2BS = both_2BS.roll(1, dims=-1)
    return both_2BS[0], both_2BS[1] if return_entropy else torch.zeros_like(both_2BS[0])


def logits_at(
    vocabulary: Vocabulary,
    hidden_SBH: Tensor,
    rows_K: Tensor,
    positions_K: Tensor,
    *,
    share: ContextShare | None = None,
) -> Tensor:
    """Logits over the whole vocabulary at the given rows and positions, for sampling and comparisons.

    Shapes:  hidden_SBH and `share` as in `next_token_logprobs`, rows_K and positions_K [K] int64 -> [K, true
             vocabulary] fp32, equal on every rank of the tensor- and context-parallel groups. No gradient.
    Memory:  K x padded vocabulary, twice under tensor parallelism: choose few positions.
    """
    with torch.no_grad():
        hidden_KH = _hidden_at(vocabulary, hidden_SBH, rows_K, positions_K, share)
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


def _hidden_at(
    vocabulary: Vocabulary, hidden_SBH: Tensor, rows_K: Tensor, positions_K: Tensor, share: ContextShare | None
) -> Tensor:
    """Hidden states [K, H]. Under sequence and context parallelism one rank has a position; the others add zeros."""
    groups = []
    if share is not None:
        groups.append(share.group)
        positions_K = share.place_S[positions_K] - share.group.rank() * len(share.own_S)
    if vocabulary.group is not None and vocabulary.sequence_parallel:
        groups.append(vocabulary.group)
        positions_K = positions_K - vocabulary.group.rank() * hidden_SBH.size(0)
    if not groups:
        return hidden_SBH[positions_K, rows_K]
    num_local = hidden_SBH.size(0)
    is_local_K = (positions_K >= 0) & (positions_K < num_local)
    hidden_KH = hidden_SBH[positions_K.clamp(0, num_local - 1), rows_K].masked_fill(~is_local_K[:, None], 0.0)
    for group in groups:
        dist.all_reduce(hidden_KH, group=group)
    return hidden_KH
