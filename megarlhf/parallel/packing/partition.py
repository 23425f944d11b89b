"""Partitioning ragged sequences into packed micro-batches of bounded tokens, balanced over data-parallel ranks.

Pure integers: every rank knows every sample's length and finds the same packing, without a message. Three steps: as
few micro-batches as first-fit-decreasing needs; within that number, costs as equal as can be (longest processing time
first, under the budget); then moves and swaps of groups, first among micro-batches, then among ranks (`bins.py`).
`packing/tree_partition.py` does the same for sequences that begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.parallel.packing.bins import balance, costliest_first, first_fit_decreasing, to_integers


@dataclass(frozen=True)
class ForwardCost:
    """What a forward of one sequence costs, linear and quadratic in its length.

    The unit is relative: `pack` compares costs with each other only. `forward_cost` counts floating-point operations.
    """

    per_token: float
    per_pair: float
    """Of each (query, key) pair that causal attention looks at."""
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
        """Cost of a beginning of `shared` tokens and of what continues it, in tokens each, with one copy of it."""
        pairs = self.pairs(shared) + sum(self.pairs(shared + length) - self.pairs(shared) for length in continuations)
        return self.per_token * (shared + sum(continuations)) + self.per_pair * pairs

    def of_segments(self, lengths: Sequence[int], parents: Sequence[int]) -> float:
        """Cost of a row of segments, as in `packed_rows.PackedRow`; the parent of a root is negative."""
        ends: list[int] = []
        pairs = 0
        for length, parent in zip(lengths, parents, strict=True):
            before = 0 if parent < 0 else ends[parent]
            ends.append(before + length)
            pairs += self.pairs(before + length) - self.pairs(before)
        return self.per_token * sum(lengths) + self.per_pair * pairs

    def pairs(self, length: int) -> int:
        """Of (query, key) in a sequence of `length` tokens: the token at position t looks at t + 1, as far as the
        window reaches."""
        reach = length if self.window is None else min(length, self.window)
        return reach * (reach + 1) // 2 + (length - reach) * reach


def forward_cost(arch: Architecture) -> ForwardCost:
    """Floating-point operations of a forward: 2 per weight and token, 4 per head channel and attended pair.

    Weights: attention projections and MLP, or the router and the experts that a token goes to. The embedding is a
    lookup. The vocabulary product is left out: it runs on response tokens only, whose number a length does not tell,
    and models with a scalar head have none. Biases, norms and the softmax are left out as small. A backward costs
    twice the forward in either term, so that the proportions also hold for training.
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
    """Raises ValueError when one of `lengths` exceeds `max_tokens`; `what` is what the lengths are of, in one word."""
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"{what} {index} has {length} tokens, expected at most {max_tokens} (max_tokens_per_micro_batch); it "
                f"is not split: raise max_tokens_per_micro_batch to {max(lengths)}, or shorten what is longer"
            )


def pack(
    groups: Sequence[Sequence[int]], *, num_ranks: int, max_tokens: int, cost: ForwardCost
) -> list[list[list[int]]]:
    """[rank][micro-batch]: indices into `groups`, each once; `groups[i]` are lengths of sequences that stay together.

    Every rank has the same number of micro-batches, each of `max_tokens` tokens at most: in all as many as
    first-fit-decreasing needs, rounded up to a multiple of `num_ranks`. Micro-batches are empty only where there are
    fewer groups than micro-batches. A rank's come costliest first, so that those which ranks run at the same time are
    alike; within one the longest group comes first, ties in the order of their indices.

    The same on every rank: it depends on the arguments only. 100,000 groups take seconds.

    Raises: ValueError when a group is longer than `max_tokens`, on an empty group, and on a length, `num_ranks` or
    `max_tokens` below 1.
    """
    _check(groups, num_ranks, max_tokens)
    tokens = [sum(map(int, lengths)) for lengths in groups]
    require_fits(tokens, max_tokens)
    costs = to_integers([sum(cost.of(int(length)) for length in lengths) for lengths in groups])
    fewest = first_fit_decreasing(tokens, max_tokens)
    bins, ranks = balance(tokens, costs, max_tokens, fewest, num_ranks)
    costliest_first(bins, ranks)
    return [[sorted(bins.members[n], key=lambda group: (-tokens[group], group)) for n in rank] for rank in ranks]


def _check(groups: Sequence[Sequence[int]], num_ranks: int, max_tokens: int) -> None:
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} = {value}, expected 1 or more; give a positive number")
    for index, lengths in enumerate(groups):
        if len(lengths) == 0:
            raise ValueError(f"group {index} holds no sequence, expected one or more; leave the group out")
        if min(lengths) < 1:
            raise ValueError(
                f"group {index} holds a sequence of {min(lengths)} tokens, expected 1 or more; leave the sequence out"
            )
