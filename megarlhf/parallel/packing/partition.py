"""Packing of sequences into micro-batches of bounded tokens, balanced over data-parallel ranks.

Pure integers: every rank knows every sample's length and computes the same packing, without communication. Three steps:

1. The number of micro-batches is what first-fit-decreasing needs.
2. Within this number, longest-processing-time-first makes costs nearly equal.
3. Moves and swaps of groups balance further, first among micro-batches, then among ranks (`bins.py`).

`packing/tree_partition.py` does the same for sequences with a common prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.parallel.packing.bins import costliest_first, pack_balanced, to_integers


@dataclass(frozen=True)
class ForwardCost:
    """Cost of one sequence's forward, with a linear and a quadratic term in its length.

    The unit is free: `pack` only compares costs. `forward_cost` counts floating-point operations.
    """

    per_token: float
    per_pair: float
    """Cost of each (query, key) pair of causal attention."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None: the whole past."""

    def __post_init__(self) -> None:
        assert min(self.per_token, self.per_pair) >= 0, f"costs must not be negative, got {self}"
        assert self.per_token + self.per_pair > 0, f"a token or a pair must cost something, got {self}"
        assert self.window is None or self.window >= 1, f"a token attends to itself at least, got {self}"

    def of(self, length: int) -> float:
        """Cost of one sequence of `length` tokens."""
        return self.per_token * length + self.per_pair * self.pairs(length)

    def of_tree(self, shared: int, continuations: Sequence[int]) -> float:
        """Cost of a prefix of `shared` tokens and of its continuations (tokens of each), with one copy of the
        prefix."""
        pairs = self.pairs(shared) + sum(self.pairs(shared + length) - self.pairs(shared) for length in continuations)
        return self.per_token * (shared + sum(continuations)) + self.per_pair * pairs

    def of_segments(self, lengths: Sequence[int], parents: Sequence[int]) -> float:
        """Cost of a row of segments, as in `packing.rows.PackedRow`; the parent of a root is negative."""
        ends: list[int] = []
        pairs = 0
        for length, parent in zip(lengths, parents, strict=True):
            before = 0 if parent < 0 else ends[parent]
            ends.append(before + length)
            pairs += self.pairs(before + length) - self.pairs(before)
        return self.per_token * sum(lengths) + self.per_pair * pairs

    def pairs(self, length: int) -> int:
        """Number of (query, key) pairs in a sequence of `length` tokens: the token at position t sees t + 1 tokens, or
        the window if it is shorter."""
        reach = length if self.window is None else min(length, self.window)
        return reach * (reach + 1) // 2 + (length - reach) * reach


def forward_cost(arch: Architecture) -> ForwardCost:
    """Floating-point operations of a forward: 2 per weight and token, 4 per head channel and attended pair.

    Weights are the attention projections and the MLP, or the router and the experts of a token. Not counted: the
    embedding (a lookup); the vocabulary product (it runs on response tokens only, whose number is not known from the
    length, and models with a scalar head have none); biases, norms and softmax (small). A backward costs twice the
    forward in both terms, so the proportions also hold for training.
    """
    hidden, channels = arch.hidden_size, arch.num_heads * arch.head_dim
    attention = hidden * (2 * channels + 2 * arch.num_kv_heads * arch.head_dim)
    matrices = 3 if arch.gated_mlp else 2
    if arch.num_experts:
        mlp = hidden * (matrices * arch.experts_per_token * arch.expert_ffn_size + arch.num_experts)
    else:
        mlp = hidden * matrices * arch.ffn_size
    return ForwardCost(
        per_token=2.0 * arch.num_layers * (attention + mlp),
        per_pair=4.0 * arch.num_layers * channels,
        window=arch.sliding_window,
    )


def require_fits(lengths: Sequence[int], max_tokens: int, what: str = "group") -> None:
    """Raise ValueError when one of `lengths` exceeds `max_tokens`. `what`: name of a thing with such a length."""
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"{what} {index} has {length} tokens, expected at most {max_tokens} (max_tokens_per_micro_batch), and "
                f"cannot be split; raise max_tokens_per_micro_batch to {max(lengths)}, or shorten longer ones"
            )


def pack(
    groups: Sequence[Sequence[int]], *, num_ranks: int, max_tokens: int, cost: ForwardCost
) -> list[list[list[int]]]:
    """Pack groups into micro-batches. `groups[i]`: lengths of sequences that stay together.

    Every rank gets the same number of micro-batches, each of at most `max_tokens` tokens: in all as many as
    first-fit-decreasing needs, rounded up to a multiple of `num_ranks`. A micro-batch is empty only where there are
    fewer groups than micro-batches. A rank's micro-batches come costliest first, so that ranks run similar ones at the
    same time. Within a micro-batch the longest group comes first, then the lower index.

    The result depends on the arguments only, so it is equal on all ranks. 100,000 groups take seconds.

    Returns: [rank][micro-batch]: indices into `groups`, each once
    Raises: ValueError when a group is longer than `max_tokens`, on an empty group, and on a length, `num_ranks` or
        `max_tokens` below 1
    Example: groups [[3], [2, 2], [4], [1]], 2 ranks, 5 tokens, cost = tokens: 12 tokens need three micro-batches,
        rounded up to four -> [[[1], [0]], [[2], [3]]]
    """
    require_positive(num_ranks=num_ranks, max_tokens=max_tokens)
    _check(groups)
    tokens = [sum(map(int, lengths)) for lengths in groups]
    require_fits(tokens, max_tokens)
    costs = to_integers([sum(cost.of(int(length)) for length in lengths) for lengths in groups])
    bins, ranks = pack_balanced(tokens, costs, max_tokens, num_ranks)
    costliest_first(bins, ranks)
    return [[sorted(bins.members[n], key=lambda group: (-tokens[group], group)) for n in rank] for rank in ranks]


def require_positive(**numbers: int) -> None:
    """Raise ValueError for a number below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} = {value}, expected 1 or more; give a positive number")


def _check(groups: Sequence[Sequence[int]]) -> None:
    for index, lengths in enumerate(groups):
        if len(lengths) == 0:
            raise ValueError(f"group {index} holds no sequence, expected one or more; leave the group out")
        if min(lengths) < 1:
            raise ValueError(
                f"group {index} holds a sequence of {min(lengths)} tokens, expected 1 or more; leave the sequence out"
            )
