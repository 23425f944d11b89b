"""Comparison of what the ranks of a user's loop have computed, each by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch.distributed as dist

_SHOWN = 200
"""Characters of a value in a message."""


def require_same(what: str, items: list[object], remedy: str) -> None:
    """Compare items between all ranks. Collective.

    what:  name of an item in the plural, for messages
    items: values that are equal where they are written alike, such as numbers and texts

    Raises: ValueError, on every rank, that names the first item that differs, and its value on two ranks.
    """
    if dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(repr(items).encode()).digest()
    digests = [digest] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    by_rank: list[Sequence[object]] = [()] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(items))
    first = by_rank[0]
    for rank, others in enumerate(by_rank):
        if len(others) != len(first):
            raise ValueError(f"{what}: rank 0 has {len(first)} of them and rank {rank} has {len(others)}; {remedy}")
        for n, (ours, theirs) in enumerate(zip(first, others, strict=True)):
            if ours != theirs:
                raise ValueError(
                    f"{what}: number {n} is {_short(ours)} on rank 0 and {_short(theirs)} on rank {rank}; {remedy}"
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
