"""What fails on one rank is raised on all of them, so that nobody is left waiting in the next collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist


@contextlib.contextmanager
def raise_on_all_ranks(
    error: Callable[[Sequence[str]], Exception], group: dist.ProcessGroup | None = None
) -> Iterator[list[str]]:
    """A local step between collectives: when it fails on any rank of the group, it fails on every one.

        with raise_on_all_ranks(lambda reasons: TransferError("; ".join(reasons)), group) as problems:
            problems += problems_of(parameters)

    A failure is whatever the block raises, and whatever it adds to `problems` in words. `error` makes an exception of
    all reasons, each of the form `rank 0, 2: what`. Collective, at the end of the block; nothing inside it may
    communicate, since a rank that has failed would not be there.
    """
    problems: list[str] = []
    failure: Exception | None = None
    try:
        yield problems
    except Exception as raised:  # noqa: BLE001 -- whatever it is, all ranks raise it; what ends the process passes
        failure = raised
        problems.append(f"{type(raised).__name__}: {raised}")
    problems_by_rank: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(problems_by_rank, problems, group=group)
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, reasons in zip(dist.get_process_group_ranks(group), problems_by_rank, strict=True):
        for reason in reasons:
            ranks_by_reason.setdefault(reason, []).append(rank)
    if ranks_by_reason:
        reasons = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in ranks_by_reason.items()]
        raise error(reasons) from failure
