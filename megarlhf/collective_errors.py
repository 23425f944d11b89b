"""Raises an error of one rank on all ranks, so that no rank is left waiting in the next collective."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from megarlhf.errors import OwnCodeError, WatchdogInterrupt, WatchdogTimeout
from megarlhf.own_code.failures import cut

_SHOWN = 200
"""Characters of a value in a message."""

Value = TypeVar("Value")


class raise_on_all_ranks:
    """A local step between collectives: if it fails on any rank of the group, it fails on every rank.

        with raise_on_all_ranks(lambda reasons: TransferError("; ".join(reasons)), group) as problems:
            problems += problems_of(parameters)

    A failure is an exception of the block, or a message that it adds to `problems`. `error` makes an exception from all
    reasons, each of the form `rank 0, 2: reason`. The end of the block is collective. Nothing inside may communicate,
    since a rank that failed would not take part.

    If the watchdog interrupts the block on any rank, every rank raises `WatchdogTimeout`.
    """

    # A class, because contextlib.contextmanager takes a RuntimeError from a StopIteration for its own.

    def __init__(self, error: Callable[[Sequence[str]], Exception], group: dist.ProcessGroup | None = None) -> None:
        self._error, self._group = error, group
        self._problems: list[str] = []

    def __enter__(self) -> list[str]:
        return self._problems

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupted = isinstance(failure, WatchdogInterrupt)
        if failure is not None:
            # SystemExit counts as a failure: a user's function or a library called sys.exit, and the other ranks would
            # wait for this one.
            if not isinstance(failure, Exception | WatchdogInterrupt | SystemExit):
                return  # this process was told to end, and the launcher ends the others
            self._problems.append(str(failure) if interrupted else f"{type(failure).__name__}: {failure}")
        by_rank: list[tuple[list[str], bool]] = [([], False)] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, (self._problems, interrupted), group=self._group)
        any_interrupted = any(stopped for _, stopped in by_rank)
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, (problems, stopped) in zip(dist.get_process_group_ranks(self._group), by_rank, strict=True):
            for problem in problems if stopped or not any_interrupted else []:
                ranks_by_reason.setdefault(problem, []).append(rank)
        if ranks_by_reason:
            reasons = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in ranks_by_reason.items()]
            if any_interrupted:
                raise WatchdogTimeout("; ".join(reasons), agreed=self._group is None) from failure
            raise self._error(reasons) from failure


def on_first_rank(action: Callable[[], object]) -> None:
    """Call `action` on rank 0 only; its ValueError is raised on every rank. Collective."""
    message: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except ValueError as error:
            message = [str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise ValueError(message[0])


def from_first_rank(value: Value) -> Value:
    """Broadcast rank 0's value to every rank. Collective."""
    return from_rank(value, 0)


def from_rank(value: Value, rank: int) -> Value:
    """Broadcast the value of `rank` to every rank. Collective."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=rank)
    return values[0]


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Scope in which every rank calls code of the user, and nothing communicates. The end of it is collective.

    Raises: OwnCodeError, on every rank, for a ValueError of any rank.
    """
    with raise_on_all_ranks(_own_code_error) as problems:
        try:
            yield
        except ValueError as error:
            problems.append(str(error))


def _own_code_error(reasons: Sequence[str]) -> OwnCodeError:
    """An error from reasons `rank 0, 1: text`. A reason of all ranks is given without them."""
    ranks, _, text = reasons[0].partition(": ")
    everywhere = len(ranks.split(",")) == dist.get_world_size()
    return OwnCodeError(text if everywhere else "; ".join(reasons))


def require_same(digests: Mapping[str, str], remedy: str) -> None:
    """Check that every rank has the same digest of each named thing. Collective.

    Raises: OwnCodeError, on every rank, that names what differs, with the ranks of each value and the remedy.
    """
    by_rank: list[Mapping[str, str]] = [digests]
    if dist.is_initialized():
        by_rank = [digests] * dist.get_world_size()
        dist.all_gather_object(by_rank, digests)
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(by_rank):
            ranks.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            parts = " and ".join(f"ranks {', '.join(map(str, group))}" for group in ranks.values())
            raise OwnCodeError(f"{name} differs between {parts}; {remedy}")


def require_same_items(what: str, items: Sequence[object], remedy: str) -> None:
    """Check that every rank has the same items. Collective.

    what:  name of an item in the plural, for messages
    items: values that are equal where they are written alike, such as numbers and texts

    Raises: OwnCodeError, on every rank, that names the first item that differs, and its value on two ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(repr(list(items)).encode()).digest()
    digests = [digest] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    by_rank: list[Sequence[object]] = [()] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(items))
    first = by_rank[0]
    for rank, others in enumerate(by_rank):
        if len(others) != len(first):
            raise OwnCodeError(f"{what}: rank 0 has {len(first)} of them and rank {rank} has {len(others)}; {remedy}")
        for n, (ours, theirs) in enumerate(zip(first, others, strict=True)):
            if ours != theirs:
                raise OwnCodeError(
                    f"{what}: number {n} is {cut(repr(ours), _SHOWN)} on rank 0 and {cut(repr(theirs), _SHOWN)} on "
                    f"rank {rank}; {remedy}"
                )
