"""Python objects from ranks that are not rehearsed, where they differ from this rank's.

`device.py` answers collectives of tensors. For objects, every rank is taken to send the same as this one, except for
shares of samples: each rank has its own, and their sizes may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from megarlhf.layout import split_evenly
from megarlhf.rollout.rewards.batch import RewardResult


def gathered(mine: Any, totals: Sequence[int], rank: int, world_size: int) -> list[Any] | None:
    """Objects that `all_gather_object` returns from each rank; None if they equal this rank's.

    totals: numbers of samples that may be rewarded now, of which each rank has a share. The first of which this rank
            would have as many as it has is taken.
    """
    if isinstance(mine, tuple) and len(mine) == 2 and isinstance(mine[0], list) and _are_outcomes(*mine):
        outcomes = mine[0] or [RewardResult(value=1.0)]
        splits = ([*map(len, split_evenly(total, world_size))] for total in totals)
        shares = next(shares for shares in splits if shares[rank] == mine[1])
        # Each its own object: pickle writes one that comes again as a reference, which is shorter.
        return [([deepcopy(outcomes[n % len(outcomes)]) for n in range(share)], share) for share in shares]
    return None


def _are_outcomes(outcomes: list[Any], count: Any) -> bool:
    return type(count) is int and count == len(outcomes) and all(isinstance(x, RewardResult) for x in outcomes)


EMPTY_BANK: Any = (0, 0, {}, {})
"""Contents of the rollout bank that rank 0 sends in a run that has just begun: `rollout/bank.py`."""
