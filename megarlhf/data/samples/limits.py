"""Limits of the length of samples, by the configuration, the model, and a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarlhf.data.sample_types import Unusable
from megarlhf.data.samples.dataset import lengths_of


@dataclass(frozen=True)
class Limit:
    """The limit of a sample's length.

    Example: `Limit("response", 100, 130)` for a prompt of 30 tokens and at most 100 tokens of response.
    """

    what: str
    """Name of the limited part."""
    tokens: int
    """Most tokens of this part."""
    end: int
    """Most tokens of the sample."""

    @property
    def over(self) -> str:
        """Reason for skipping a longer sample."""
        return _too_long(self.what, self.tokens)


def require_at_most(tokens: int, limit: int, what: str) -> None:
    """Raises: Unusable for a part with more tokens than the limit."""
    if tokens > limit:
        raise Unusable(_too_long(what, limit))


def _too_long(what: str, limit: int) -> str:
    return f"{what} longer than {limit} tokens"


def require_fitting(
    samples: Sequence[Any],
    sequences: Sequence[Sequence[str]],
    *,
    positions: int,
    model: str,
    budget: int | None,
    source: str,
    parts: str,
) -> None:
    """Check the lengths of all samples.

    sequences: for each sequence of a sample, the fields that form it
    parts: names of a sample's parts, for a message

    Raises: ValueError when a sequence does not fit the model's positions, or a sample a micro-batch."""
    lengths_SN = [sum(lengths_of(samples, name) for name in names) for names in sequences]
    require_positions(int(max(map(np.max, lengths_SN))), positions, model)
    require_budget(sum(lengths_SN), budget, source, parts)


def require_positions(longest: int, max_positions: int, model: str) -> None:
    """Raises ValueError when a sample has more tokens than the model has positions."""
    if longest > max_positions:
        raise ValueError(
            f"the longest sample has {longest} tokens, {model} takes {max_positions} (max_position_embeddings, or less "
            "where a rope type changes beyond); lower data.max_prompt_tokens or data.max_response_tokens, so "
            "that such samples are skipped and counted"
        )


def require_budget(lengths_N: Any, budget: int | None, path: str, sample: str) -> None:
    """Raises ValueError when a sample has more tokens than a packed micro-batch may hold (`None`: it is not packed)."""
    tokens = np.asarray(lengths_N)
    if budget is not None and tokens.max() > budget:
        longest = int(tokens.argmax())
        raise ValueError(
            f"{path}: usable record {longest} has {tokens[longest]} tokens ({sample}), but "
            f"train.max_tokens_per_micro_batch = {budget}, and no sequence is split; raise it to {tokens[longest]} or "
            "more, or lower data.max_prompt_tokens or data.max_response_tokens: what is longer is skipped and counted"
        )
