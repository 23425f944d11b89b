"""Which records of a set are read: a command's share of several, and those that are set aside for validation.

Positions are drawn by numbers that follow from the seed and from the record or its prompt alone, so that the order of
the files decides nothing for validation, and the commands agree on their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from megarlhf.data.columns import Array
from megarlhf.data.megatron_indexed import IndexedSamples
from megarlhf.data.tokenized import Samples, Selected, Stored

Sample = TypeVar("Sample")


def phase_share(
    samples: Stored[Sample] | IndexedSamples[Sample], shares: Sequence[float], phase: int, seed: int
) -> Selected[Sample]:
    """The samples whose records are in a phase's share. All records of the source are put into an order that follows
    from the seed, and cut where the shares say; so the shares of all phases are disjoint, whatever a command skips.

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
    """Of each set the samples to train on, and those to validate on: of all sets together as near to the share as whole
    prompts allow. One cut through the prompts of all of them, so that none is on both sides.

    Raises: ValueError where nothing would be left to train on.
    """
    prompts, which, counts = np.unique(
        np.concatenate([part.prompts() for part in parts]), return_inverse=True, return_counts=True
    )
    total = len(which)
    order = np.argsort(_mixed(prompts, seed, b"validation"), kind="stable")
    wanted = max(1, round(share * total))
    ends = np.cumsum(counts[order])
    taken = int(np.searchsorted(ends, wanted)) + 1
    if taken >= len(prompts):
        raise ValueError(
            f"data.validation_share = {share:g} of {total} samples with {len(prompts)} different prompts leaves "
            "nothing to train on, since samples with one prompt stay together; give a smaller share, or more data"
        )
    held = np.zeros(len(prompts), dtype=bool)
    held[order[:taken]] = True
    of_parts = np.split(held[which], np.cumsum([len(part) for part in parts])[:-1])
    kept = [Selected(part, np.flatnonzero(~is_held)) for part, is_held in zip(parts, of_parts, strict=True)]
    away = [Selected(part, np.flatnonzero(is_held)) for part, is_held in zip(parts, of_parts, strict=True)]
    return kept, away


def _mixed(values: Array, seed: int, purpose: bytes) -> Array:
    """Numbers without a pattern from numbers (the finalizer of splitmix64, twice)."""
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
