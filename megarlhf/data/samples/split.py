"""Selection of the records that are read: a command's share of several, and records set aside for validation.

Records are ranked by numbers that follow from the seed and the record or its prompt alone. So the order of the files
does not matter for validation, and all commands agree on their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from megarlhf.data.samples.columns import Array
from megarlhf.data.samples.dataset import Samples, Selected, Stored
from megarlhf.data.samples.megatron_indexed import IndexedSamples

Sample = TypeVar("Sample")
_MISSED = 0.1
"""Most deviation from the wanted share, relative to all samples. More would be another split than was meant."""


def phase_share(
    samples: Stored[Sample] | IndexedSamples[Sample], shares: Sequence[float], phase: int, seed: int
) -> Selected[Sample]:
    """Samples whose records are in a phase's share. All records of the source are put into an order that follows from
    the seed, which is cut by the shares. So the shares of all phases are disjoint, whatever records a command skips.

    Raises: ValueError for a share without a sample.
    """
    total = samples.num_records
    order = np.argsort(_mixed(np.arange(total, dtype=np.uint64), seed, b"phases"), kind="stable")
    rank = np.empty(total, dtype=np.int64)
    rank[order] = np.arange(total)
    first, end = (round(sum(shares[:n]) * total) for n in (phase, phase + 1))
    ranks = rank[samples.records()]
    positions = np.flatnonzero((ranks >= first) & (ranks < end))
    if not len(positions):
        raise ValueError(
            f"data.phases leaves this command records {first} to {end} of the {total} in their drawn order, with no "
            "usable one among them; give it a larger share, or more data"
        )
    return Selected(samples, positions)


def set_aside(
    parts: Sequence[Samples[Sample]], share: float, seed: int
) -> tuple[list[Selected[Sample]], list[Selected[Sample]]]:
    """Samples of each set to train on and to validate on. Over all sets, the share is met as nearly as whole prompts in
    their drawn order allow. Prompts of all sets are chosen at once, so that none is on both sides.

    Raises: ValueError where nothing would be left to train on, or the share would be missed by a tenth of all samples.
    """
    prompts, which, counts = np.unique(
        np.concatenate([part.prompts() for part in parts]), return_inverse=True, return_counts=True
    )
    total = len(which)
    order = np.argsort(_mixed(prompts, seed, b"validation"), kind="stable")
    wanted = max(1, round(share * total))
    taken = order[_nearest(counts[order], wanted)]
    asked = f"data.validation_share = {share:g} of {total} samples with {len(prompts)} different prompts"
    if len(taken) == len(prompts):
        raise ValueError(
            f"{asked} leaves nothing to train on, since samples with one prompt stay together; give a smaller share, "
            "or more data"
        )
    num_held = int(counts[taken].sum())
    if abs(num_held - wanted) > _MISSED * total:
        raise ValueError(
            f"{asked} cannot be met: samples with one prompt stay together, the most frequent has {counts.max()}, and "
            f"{num_held} samples ({num_held / total:.3g}) would be set aside in place of {wanted}; give "
            f"data.validation_share = {num_held / total:.3g}, or data.validation"
        )
    held = np.zeros(len(prompts), dtype=bool)
    held[taken] = True
    of_parts = np.split(held[which], np.cumsum([len(part) for part in parts])[:-1])
    kept = [Selected(part, np.flatnonzero(~is_held)) for part, is_held in zip(parts, of_parts, strict=True)]
    away = [Selected(part, np.flatnonzero(is_held)) for part, is_held in zip(parts, of_parts, strict=True)]
    return kept, away


def _nearest(counts: Array, wanted: int) -> Array:
    """Positions, in order, of counts whose sum is near `wanted`. Each count that still fits is taken. At the end the
    smallest other one is added where this brings the sum nearer, or nothing was taken."""
    left, rest, taken = wanted, np.arange(len(counts)), list[Array]()
    while left and len(rest := rest[counts[rest] <= left]):
        ends = np.cumsum(counts[rest])
        fitting = int(np.searchsorted(ends, left, side="right"))
        taken.append(rest[:fitting])
        left, rest = left - int(ends[fitting - 1]), rest[fitting:]
    chosen = np.concatenate([*taken, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    others = np.setdiff1d(np.arange(len(counts)), chosen)
    if left and len(others):
        smallest = others[np.argmin(counts[others])]
        if not len(chosen) or counts[smallest] - left < left:
            chosen = np.append(chosen, smallest)
    return chosen


def _mixed(values: Array, seed: int, purpose: bytes) -> Array:
    """Hash numbers to numbers without a pattern (the finalizer of splitmix64, twice)."""
    with np.errstate(over="ignore"):
        mixed: Any = values.astype(np.uint64) ^ _scrambled(
            np.uint64(seed) ^ np.uint64(int.from_bytes(purpose[:7], "little"))
        )
        return _scrambled(_scrambled(mixed))


def _scrambled(values: Any) -> Any:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
