"""Two patches of torch for process groups that are made by their members alone. They are active only while a group is
made. Checked with torch 2.13; `tests/test_devices_and_patches.py` fails when one is no longer needed.

Names. With `use_local_synchronization` torch names a group by its ranks and by the number of groups in this process.
Members find each other by that name. They would wait forever where they are in different numbers of groups: the first
and last of more than two pipeline stages are in one more group, and so are ranks with a role that others do not have.

Threads. gloo's two threads of a group write the name of the last message into one string without a lock
(`ProcessGroupGloo::runLoop`). With two messages at once, such as gradient sums during a backward, both threads
sometimes free the same memory, and the process dies, or worse. With one thread the messages of a group come one after
the other, as with NCCL.
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
    """gloo with one thread per group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._timeout, options._threads = timeout, 1
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def made_by_members(purpose: str = "") -> Iterator[None]:
    """Scope in which a new group is named by its ranks and by the number of groups of these ranks, and a gloo group has
    one thread. A group that is destroyed later needs a `purpose` of its own: its members' messages stay in the store
    under the group's name.

    Raises: RuntimeError where torch has no such function.
    """
    original = getattr(distributed_c10d, NAMER, None)
    if original is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d.{NAMER}, which names process groups; "
            "use the torch of requirements/, or correct parallel/process_groups.py"
        )
    distributed_c10d._hash_ranks_to_str = partial(_name, purpose)
    distributed_c10d.ProcessGroupGloo = OneThreadGloo  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original
        distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def _name(purpose: str, ranks: list[int]) -> str:
    earlier = sum(dist.get_process_group_ranks(group) == list(ranks) for group in distributed_c10d._world.pg_names)
    text = "_".join(map(str, [purpose, *ranks, "number", earlier]))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
