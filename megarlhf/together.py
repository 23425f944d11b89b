"""What fails on one rank is raised on all of them, so that nobody is left waiting in the next collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch.distributed as dist


class FailingTogether:
    """A local step between collectives: when it fails on any rank of the group, it fails on every one.

        with FailingTogether(lambda reasons: TransferError("; ".join(reasons)), group) as found:
            found += problems_of(parameters)

    A failure is whatever the block raises, and whatever it adds to `found` in words. `error` makes an exception of all
    reasons, each of the form `rank 0, 2: what`. Collective, at the end of the block; nothing inside it may communicate,
    since a rank that has failed would not be there.
    """

    def __init__(self, error: Callable[[Sequence[str]], Exception], group: dist.ProcessGroup | None = None) -> None:
        self._error, self._group = error, group
        self._found: list[str] = []

    def __enter__(self) -> list[str]:
        return self._found

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if failure is not None:
            if not isinstance(failure, Exception):
                return  # this process has been told to end, and whoever started the ranks ends the others
            self._found.append(f"{type(failure).__name__}: {failure}")
        told: list[list[str]] = [[]] * dist.get_world_size(self._group)
        dist.all_gather_object(told, self._found, group=self._group)
        ranks: dict[str, list[int]] = {}
        for rank, reasons in zip(dist.get_process_group_ranks(self._group), told, strict=True):
            for reason in reasons:
                ranks.setdefault(reason, []).append(rank)
        if ranks:
            raise self._error(
                [f"rank {', '.join(map(str, where))}: {reason}" for reason, where in ranks.items()]
            ) from failure
