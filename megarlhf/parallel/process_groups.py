"""torch's process groups that their members make alone, and two of torch's habits that they must not have: patches, in
force while a group is made. Checked with torch 2.13; `tests/test_devices_and_patches.py` says when one is needless.

Names. With `use_local_synchronization` torch names a group by its ranks and by how many groups this process has.
Members find each other by that name, and so wait for each other for ever where they are in different numbers of groups:
the first and the last of more than two pipeline stages have one more, as have ranks with a role that others have
nothing of.

Threads. gloo's two threads of a group write down the name of the last message in one string without a lock
(`ProcessGroupGloo::runLoop`). Where two messages are under way, as gradient sums beside a backward are, one of them
sometimes frees what the other frees too, and the process dies, or worse. With one thread messages of a group come one
after the other, as they do with NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

NAMER = "_hash_ranks_to_str"


class OneThreadGloo(ProcessGroupGloo):
    """gloo with one thread for a group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._timeout, options._threads = timeout, 1
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def made_by_members(purpose: str = "") -> Iterator[None]:
    """Inside, a new group is named by its ranks and by how many groups of just these ranks there are, and gloo's has
    one thread. A group that is destroyed again needs a `purpose` that no other has: what its members have told each
    other stays in the store, under the name.

    Raises: RuntimeError where torch has other names for this.
    """
    named = getattr(distributed_c10d, NAMER, None)
    if named is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d.{NAMER}, by which process groups are "
            "named; use the torch of requirements/, or correct parallel/process_groups.py"
        )
    distributed_c10d._hash_ranks_to_str = partial(_name, purpose)
    distributed_c10d.ProcessGroupGloo = OneThreadGloo  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = named
        distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def _name(purpose: str, ranks: list[int]) -> str:
    others = sum(dist.get_process_group_ranks(group) == list(ranks) for group in distributed_c10d._world.pg_names)
    text = "_".join(map(str, [purpose, *ranks, "number", others]))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
