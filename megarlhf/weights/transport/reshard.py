"""The resharder: executes a copy plan over a process group into live memory, again and again.

Everything travels in rounds, several of them in flight at a time: `messages.py` says what is gathered into a bucket
and scattered from another, and what travels from and to where it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.weights.plan.copy_plan import CopyPlan
from megarlhf.weights.transport.messages import Message, RankMessages, Round, bucket_size
from megarlhf.weights.transport.storages import Storages

BUCKET_BYTES = 256 << 20
DIRECT_BYTES = 1 << 20
"""Size from which on a contiguous range is a message of its own. Not measured over NCCL; it limits a full bucket to
256."""
DIRECT_BYTES_CPU = 128 << 10  # over gloo a message costs some 50 us, twice as long as so many bytes take

_MIN_BUCKET_BYTES = 1 << 20
_CAST_ELEMENTS = 1 << 20
_ROUNDS_IN_FLIGHT = 8
"""Rounds at a time, each with its share of the buckets: gathering, wire and scattering overlap, and a share stays in
the cache on a CPU."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(into, from)."""


class TransferError(RuntimeError):
    """A transfer failed on some rank; the destinations may hold a mixture. Raised on every rank."""


@dataclass
class _Failure:
    """The first thing that went wrong on this rank; its peers are served on, with whatever is in the buffers."""

    error: Exception | None = None

    def guard(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 -- raised on all ranks once the peers are served
                self.error = error


@dataclass(frozen=True, slots=True)
class _LiveRound:
    """A round as tensors: views of live memory and of buckets."""

    gather: list[Pairs]
    ops: list[dist.P2POp]
    scatter: list[Pairs]


@dataclass(frozen=True)
class _Views:
    """The schedule, with views of the live storages."""

    memory: tuple[object, ...]
    """Identity of the storages that it refers to."""
    local: Pairs
    rounds: list[Round]


@dataclass(frozen=True)
class _Prepared:
    """Buffers of a run on this rank, made before the first message, so that a lack of memory is an error before
    anything is written."""

    views: _Views
    rounds: list[_LiveRound]
    buckets: list[torch.Tensor]
    """A share for sending, and one for receiving, for each round that may be under way."""


class Resharder:
    """Executes one plan among the ranks of a group, each of which makes one."""

    def __init__(
        self,
        plan: CopyPlan,
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        direct_bytes: int | None = None,
        free_bytes: Callable[[], int] | None = None,
        keep_views: bool = True,
    ) -> None:
        """Values travel in `dtype`, local ones too, and are then cast to the destination's. Ranks in plans are global.

        `bucket_bytes` bounds what a rank has gathered, and what it receives to scatter, at any moment. `direct_bytes`:
        see DIRECT_BYTES; the same on all ranks. `free_bytes` says what the device has left: buckets together take at
        most half of it, or 2 MB. `keep_views`: schedule and views of storages are kept between runs, for the same
        storages come again; on a CPU the buckets too.
        """
        self._keep_views = keep_views
        self._rank, self._dtype, self._device, self._group = rank, dtype, device, group
        self._bucket_bytes, self._free_bytes = bucket_bytes, free_bytes
        if direct_bytes is None:
            direct_bytes = DIRECT_BYTES_CPU if device.type == "cpu" else DIRECT_BYTES
        self._messages = RankMessages(plan, rank, max(1, direct_bytes // dtype.itemsize))
        self._views: _Views | None = None
        self._kept: _Prepared | None = None

    @torch.no_grad()
    def run(self, src: Storages, dst: Storages) -> None:
        """Copies everything once. Afterwards every destination box holds its source's present values. Collective.

        Raises: TransferError on every rank when any rank failed, with the reason. If it failed before the first message
        (no memory, a storage that is missing), nothing is written; else the destinations are a mixture. When a process
        or the network is gone, the RuntimeError of the backend, which need not name it.
        """
        with self._raise_on_all_ranks():
            kept = 0 if self._kept is None else sum(share.nbytes for share in self._kept.buckets)
            free = None if self._free_bytes is None else self._free_bytes() + kept
        capacity = self._capacity(self._least(free))
        with self._raise_on_all_ranks():
            ready = self._prepare(src, dst, capacity)
        failure = _Failure()
        try:
            self._rounds(ready, failure)
        except RuntimeError as error:  # of the network, over which nothing more can be told: the rest is guarded
            reason = failure.error or error
            raise TransferError(f"rank {self._rank}: {type(reason).__name__}: {reason}") from reason
        with self._raise_on_all_ranks():
            if failure.error is not None:
                raise failure.error

    def _raise_on_all_ranks(self) -> raise_on_all_ranks:
        return raise_on_all_ranks(lambda reasons: TransferError("; ".join(reasons)), self._group)

    def _least(self, free: int | None) -> int | None:
        """Free bytes of the rank that has the fewest. Collective."""
        if free is None:
            return None
        least = torch.tensor(free, device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return int(least)

    def _capacity(self, free: int | None) -> int:
        """Elements of a round: its share of the bucket for sending, and of that for receiving.

        By powers of two below `bucket_bytes`, the same on all ranks, so that few schedules are made.
        """
        size = self._bucket_bytes
        while free is not None and size > max(free // 4, _MIN_BUCKET_BYTES):
            size //= 2
        return max(1, size // _ROUNDS_IN_FLIGHT // self._dtype.itemsize)

    def _prepare(self, src: Storages, dst: Storages, capacity: int) -> _Prepared:
        views = self._views_of(src, dst, capacity)
        # A CPU keeps the buckets: pages that were never touched cost more than the copy into them. On a GPU torch's
        # allocator has them at hand.
        if self._kept is not None and self._kept.views is views:
            return self._kept
        self._kept = None
        outgoing = self._bucket([round.sends for round in views.rounds])
        incoming = self._bucket([round.receives for round in views.rounds])
        bound = [
            self._bind(round, outgoing[number % _ROUNDS_IN_FLIGHT], incoming[number % _ROUNDS_IN_FLIGHT])
            for number, round in enumerate(views.rounds)
        ]
        prepared = _Prepared(views, bound, [*outgoing, *incoming])
        if self._device.type == "cpu" and self._keep_views:
            self._kept = prepared
        return prepared

    def _views_of(self, src: Storages, dst: Storages, capacity: int) -> _Views:
        memory = (capacity, *(place_of(name, tensor) for side in (src, dst) for name, tensor in side.items()))
        if self._views is not None and self._views.memory == memory:
            return self._views
        if missing := self._messages.missing(src, dst):
            raise ValueError(f"{len(missing)} storages of the plan are missing: {', '.join(missing[:5])}")
        self._views = self._kept = None
        rounds = self._messages.rounds(capacity, src, dst, self._dtype)
        views = _Views(memory, self._messages.local(src, dst), rounds)
        if self._keep_views:
            self._views = views
        return views

    def _bucket(self, rounds: Sequence[Sequence[Message]]) -> list[torch.Tensor]:
        """Shares, each large enough for every round that uses it."""
        sizes = [bucket_size(messages) for messages in rounds]
        slots = range(min(_ROUNDS_IN_FLIGHT, len(sizes)))
        return [torch.empty(max(sizes[k::_ROUNDS_IN_FLIGHT]), dtype=self._dtype, device=self._device) for k in slots]

    def _bind(self, round: Round, outgoing: torch.Tensor, incoming: torch.Tensor) -> _LiveRound:
        gather: Pairs = []
        scatter: Pairs = []
        ops = []
        for message in round.receives:
            buffer = message.views[0] if message.bucket_range is None else incoming[message.bucket_range]
            if message.bucket_range is not None:
                scatter += zip(message.views, _split_like(buffer, message.views), strict=True)
            ops.append(dist.P2POp(dist.irecv, buffer, message.peer, self._group))
        for message in round.sends:
            buffer = message.views[0] if message.bucket_range is None else outgoing[message.bucket_range]
            if message.bucket_range is not None:
                gather += zip(_split_like(buffer, message.views), message.views, strict=True)
            ops.append(dist.P2POp(dist.isend, buffer, message.peer, self._group))
        return _LiveRound(_fused(gather), ops, _fused(scatter))

    def _rounds(self, ready: _Prepared, failure: _Failure) -> None:
        rounds = iter(ready.rounds)
        in_flight = deque(_post(round, failure) for round in islice(rounds, _ROUNDS_IN_FLIGHT))
        failure.guard(lambda: _copy_inside(ready.views.local, self._dtype))
        for round in rounds:
            _finish(*in_flight.popleft(), failure)
            in_flight.append(_post(round, failure))
        while in_flight:
            _finish(*in_flight.popleft(), failure)


def place_of(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that stays the same while the tensor has the same storage, even if that leaves memory and comes back."""
    return name, tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype


def _post(round: _LiveRound, failure: _Failure) -> tuple[_LiveRound, list[dist.Work]]:
    failure.guard(lambda: _copy_all(round.gather))
    return round, dist.batch_isend_irecv(round.ops)


def _finish(round: _LiveRound, works: list[dist.Work], failure: _Failure) -> None:
    for work in works:
        work.wait()
    failure.guard(lambda: _copy_all(round.scatter))


def _copy_inside(pairs: Pairs, dtype: torch.dtype) -> None:
    """Copy through `dtype`: the same bits as if they had been sent."""
    for into, values in pairs:
        if dtype in (into.dtype, values.dtype):
            into.copy_(values)
            continue
        rows = max(1, _CAST_ELEMENTS * len(into) // into.numel())
        for part, cast in zip(into.split(rows), values.split(rows), strict=True):
            part.copy_(cast.to(dtype))


def _split_like(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = buffer.split([view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]


def _fused(pairs: Pairs) -> list[Pairs]:
    """Flat ones apart: a single strided pair makes torch copy the whole list one by one on a GPU."""
    groups = [p for p in pairs if p[0].dim() == 1], [p for p in pairs if p[0].dim() != 1]
    return [group for group in groups if group]


def _copy_all(groups: Sequence[Pairs]) -> None:
    for pairs in groups:
        torch._foreach_copy_([into for into, _ in pairs], [values for _, values in pairs])
