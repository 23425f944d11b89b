"""torch's name of a process group that its members make alone: a patch, in force while one is made.

With `use_local_synchronization` torch names a group by its ranks and by how many groups this process has. Members find
each other by that name, and so wait for each other for ever where they are in different numbers of groups: the first
and the last of more than two pipeline stages have one more, as have ranks with a role that others have nothing of.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

PATCHED = "_hash_ranks_to_str"
"""Checked in torch 2.13; `tests/test_devices_and_patches.py` says when torch no longer counts."""


@contextlib.contextmanager
def named_by_ranks() -> Iterator[None]:
    """Inside, a new group is named by its ranks and by how many groups of just these ranks there are."""
    named = getattr(distributed_c10d, PATCHED, None)
    if named is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d.{PATCHED}, by which process groups "
            "are named; use the torch of requirements/, or correct parallel/group_names.py"
        )
    distributed_c10d._hash_ranks_to_str = _name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = named


def _name(ranks: list[int]) -> str:
    others = sum(dist.get_process_group_ranks(group) == list(ranks) for group in distributed_c10d._world.pg_names)
    text = "_".join(map(str, [*ranks, "number", others]))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
