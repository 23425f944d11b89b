"""What ranks that are not there say where it is not what this rank says: lists of Python objects.

A collective of tensors is answered in `device.py`; of objects every rank is taken to say what this one says, but for
shares of samples, of which each rank has its own, and which need not be equally many.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from megarlhf.layout import split_evenly
from megarlhf.rollout.rewards.batch import RewardResult


def gathered(mine: Any, num_samples: int, world_size: int) -> list[Any] | None:
    """What `all_gather_object` brings from each rank; None where it is what this rank has handed in.

    num_samples: of the step, of which each rank has a share
    """
    if isinstance(mine, tuple) and len(mine) == 2 and isinstance(mine[0], list) and _are_outcomes(*mine):
        outcomes = mine[0] or [RewardResult(value=1.0)]
        shares = map(len, split_evenly(num_samples, world_size))
        # Each its own object: pickle writes one that comes again as a reference, which is shorter.
        return [([deepcopy(outcomes[n % len(outcomes)]) for n in range(share)], share) for share in shares]
    return None


def _are_outcomes(found: list[Any], count: Any) -> bool:
    return type(count) is int and count == len(found) and all(isinstance(outcome, RewardResult) for outcome in found)


EMPTY_BANK: Any = (0, 0, [])
"""What rank 0 hands out of the rollout bank of a run that has just begun: `rollout/response_cache.py`."""
