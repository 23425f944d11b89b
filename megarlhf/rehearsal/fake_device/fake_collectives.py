"""Python objects from ranks that are not rehearsed, where they differ from this rank's.

`device.py` answers collectives of tensors. For objects, every rank is taken to send the same as this one, except for
shares of samples: each rank has its own, and their sizes may differ.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from megarlhf.layout import split_evenly
from megarlhf.rollout.rewards.batch import RewardResult


def gathered(mine: Any, world_size: int) -> list[Any] | None:
    """Objects that `all_gather_object` returns from each rank; None if they equal this rank's.

    mine: outcomes of this rank's samples, and the number of all samples (`rollout/rewards/score.py`), of which each
          rank has a share; or anything else
    """
    if isinstance(mine, tuple) and len(mine) == 2 and isinstance(mine[0], list) and _are_outcomes(*mine):
        outcomes = mine[0] or [RewardResult(value=1.0)]
        shares = map(len, split_evenly(mine[1], world_size))
        # Each its own object: pickle writes one that comes again as a reference, which is shorter.
        return [([deepcopy(outcomes[n % len(outcomes)]) for n in range(share)], mine[1]) for share in shares]
    return None


def _are_outcomes(outcomes: list[Any], count: Any) -> bool:
    return type(count) is int and count >= max(1, len(outcomes)) and all(isinstance(x, RewardResult) for x in outcomes)


EMPTY_BANK: Any = (0, 0, {}, {})
"""Contents of the rollout bank that rank 0 sends in a run that has just begun: `rollout/bank.py`."""
