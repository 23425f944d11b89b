"""Experts of rehearsed tokens: stated, since no router computes anything.

Megatron-Core's router takes the k largest of a token's scores. Their indices become known values here. All that follows
(tokens of each expert, selected rows, gathers) is computed from them as in a real run.

Legend: T tokens that a rank routes, E experts, K experts of a token.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType

import torch
from torch import Tensor

ROUTER = "megatron/core/transformer/moe/moe_utils.py"
"""File that takes the k largest scores."""
LAYER = "megatron/core/transformer/transformer_layer.py"
"""File whose frames call the router and are no part of it."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Distribution of tokens over the experts of each layer."""

    skew: float = 1.0
    """Tokens of the busiest expert, as a multiple of the mean. 1: all experts get equally many."""

    def __post_init__(self) -> None:
        if self.skew < 1.0:
            raise ValueError(
                f"routing skew {self.skew:g}: the busiest expert cannot get less than the mean; give 1 for a balanced "
                "routing, or more"
            )

    def experts_of(self, num_tokens: int, num_experts: int, per_token: int) -> Tensor:
        """[T, K] int64: the experts of each token, all different.

        Balanced, they are dealt out one after the other. Skewed, expert 0 gets `skew` times the mean, from tokens
        spread evenly over the row, and the others share the rest equally. Example: 4 tokens, 4 experts, one for
        each token, skew 2: [[1], [0], [2], [0]].

        Raises: ValueError where not even all tokens make the busiest expert so busy.
        """
        if self.skew == 1.0 or num_experts == per_token:
            return torch.arange(num_tokens * per_token).view(num_tokens, per_token) % num_experts
        most = num_experts / per_token
        if self.skew > most:
            raise ValueError(
                f"routing skew {self.skew:g}: with {per_token} of {num_experts} experts a token, an expert that gets "
                f"every token has {most:g} times the mean; give at most that"
            )
        busy = round(self.skew * num_tokens * per_token / num_experts)
        before_T = torch.arange(num_tokens) * busy // num_tokens
        to_first_T = before_T.diff(append=torch.tensor([busy])).bool()
        # The others are dealt out over E - 1 experts; a token that goes to expert 0 takes one of them less.
        taken_T = torch.arange(num_tokens) * per_token - before_T
        dealt_TK = 1 + (taken_T.unsqueeze(1) + torch.arange(per_token)) % (num_experts - 1)
        dealt_TK[to_first_T, -1] = 0
        return dealt_TK

    @property
    def description(self) -> str:
        """Description for the page."""
        if self.skew == 1.0:
            return "every expert of a layer gets equally many tokens"
        return f"expert 0 of each layer gets {self.skew:g} times the mean, the others share the rest equally"


def in_router() -> bool:
    """Whether the current operation is called by the router, or by the permutation of tokens that follows it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (inside := _is_router(frame.f_code.co_filename)) is not None:
            return inside
        frame = frame.f_back
    return False


@cache
def _is_router(file: str) -> bool | None:
    """Whether a file is the router's; None if its caller decides."""
    if file.endswith(ROUTER):
        return True
    return False if file.endswith(LAYER) else None
