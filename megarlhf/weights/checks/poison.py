"""Poison, sync, compare: storages are filled with NaN before a transfer, and what is left of it is named."""

from __future__ import annotations

import torch

from megarlhf.placement import RankPlacements
from megarlhf.weights.transport.storages import Storages, zero_padding


@torch.no_grad()
def poison(storages: Storages) -> None:
    """Fills everything with NaN."""
    for tensor in storages.values():
        tensor.detach().fill_(torch.nan)


def storages_with_nan(placements: RankPlacements, storages: Storages) -> list[str]:
    """Storages that still hold NaN, in words. Padding, which no transfer fills, is set to zero first."""
    zero_padding(placements, storages)
    counts = {name: int(tensor.detach().isnan().sum()) for name, tensor in storages.items()}
    return [f"{name}: {n} of {storages[name].numel()} elements are NaN" for name, n in counts.items() if n]
