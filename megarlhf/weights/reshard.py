"""The resharder: carries a copy plan over a process group into live memory, again and again.

Everything travels in rounds, several of them under way at a time. In a round a rank sends each peer one message,
gathered into a bucket and scattered from another; but a large stretch that lies in one run at an end is a message of
its own, sent from where it lies and received where it belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from megarlhf.weights.carry import Storages, copy_local
from megarlhf.weights.moves import End, Move, MoveStream, Part
from megarlhf.weights.plan import Copy, CopyPlan
from megarlhf.weights.schedule import Span, rank_rounds

BUCKET_BYTES = 256 << 20
DIRECT_BYTES = {"cpu": 128 << 10, "cuda": 1 << 20}
"""What a stretch must have to be a message of its own, by device. Over gloo a message costs some 50 us, twice as long
as so many bytes take. NCCL's cost is not measured; its figure bounds a full bucket to 256 messages."""

_MIN_BUCKET_BYTES = 16 << 20
_SLOTS = 8
"""Rounds under way at a time, each with its share of the buckets: gathering, wire and scattering overlap, and a share
stays in the cache on a CPU."""


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
class _Message:
    """Parts of one peer's stream in one round, seen from one end."""

    peer: int
    parts: Sequence[Part]
    ends: Sequence[End]
    stretch: slice | None
    """Of the bucket's share; None: the message is a single part, and travels from or to where it lies."""

    def views(self, storages: Storages) -> list[torch.Tensor]:
        return [view for part, end in zip(self.parts, self.ends, strict=True) for view in part.views(end, storages)]

    def buffer(self, storages: Storages, bucket: torch.Tensor) -> torch.Tensor:
        return self.views(storages)[0] if self.stretch is None else bucket[self.stretch]


@dataclass(frozen=True, slots=True)
class _Round:
    sends: list[_Message]
    receives: list[_Message]


@dataclass(frozen=True)
class _Prepared:
    """What a run needs on this rank before the first message, so that want of it is told before anything is written."""

    key: tuple[object, ...]
    rounds: list[_Round]
    outgoing: list[torch.Tensor]
    """A share of the bucket for each round that may be under way."""
    incoming: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.outgoing, *self.incoming))


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
    ) -> None:
        """Values travel in `dtype`, local ones too, and are then cast to the destination's. Ranks in plans are global.

        `bucket_bytes` bounds what a rank has gathered, and what it receives to scatter, at any moment. `direct_bytes`:
        see DIRECT_BYTES; the same on all ranks. `free_bytes` says what the device has left: buckets together take at
        most half of it.
        """
        self._plan, self._rank, self._dtype, self._device, self._group = plan, rank, dtype, device, group
        self._bucket_bytes, self._free_bytes = bucket_bytes, free_bytes
        least = DIRECT_BYTES[device.type] if direct_bytes is None else direct_bytes
        self._direct_elements = max(1, least // dtype.itemsize)
        self._local = plan.local(rank)
        self._outgoing = {peer: MoveStream(copies) for peer, copies in plan.sends(rank).items()}
        self._incoming = {peer: MoveStream(copies) for peer, copies in plan.receives(rank).items()}
        self._kept: _Prepared | None = None

    @torch.no_grad()
    def run(self, src: Storages, dst: Storages) -> None:
        """Carries everything once. Afterwards every destination box holds its source's present values. Collective.

        Raises: TransferError on every rank when any rank failed, with the reason. If it failed before the first message
        (no memory, a storage that is missing), nothing is written; else the destinations are a mixture.
        """
        failure = _Failure()
        free = self._least_free(failure)
        prepared: list[_Prepared] = []
        failure.guard(lambda: prepared.append(self._prepare(src, dst, self._capacity(free))))
        self._agree(failure.error)
        (ready,) = prepared
        try:
            self._rounds(ready, src, dst, failure)
        except RuntimeError as error:  # of the network: what happens here of our own is guarded
            reason = failure.error or error
            raise TransferError(f"rank {self._rank}: {type(reason).__name__}: {reason}") from reason
        self._agree(failure.error)

    def _least_free(self, failure: _Failure) -> int | None:
        """Bytes, of the poorest rank; buckets that are kept count as free. Collective."""
        if self._free_bytes is None:
            return None
        found = [0]
        kept = 0 if self._kept is None else self._kept.num_bytes
        failure.guard(lambda: found.append(self._free_bytes() + kept))  # type: ignore[misc]
        free = torch.tensor(found[-1], device=self._device)
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=self._group)
        return int(free)

    def _capacity(self, free: int | None) -> int:
        """Elements of a round: its share of the bucket for sending, and of that for receiving.

        By powers of two below `bucket_bytes`, the same on all ranks, so that few schedules are made.
        """
        size = self._bucket_bytes
        while free is not None and size > max(free // 4, _MIN_BUCKET_BYTES):
            size //= 2
        return max(1, size // _SLOTS // self._dtype.itemsize)

    def _prepare(self, src: Storages, dst: Storages, capacity: int) -> _Prepared:
        _check_all_there(self._local, self._outgoing.values(), self._incoming.values(), src, dst)
        cast = (frozenset(_of_other_dtype(src, self._dtype)), frozenset(_of_other_dtype(dst, self._dtype)))
        key = (capacity, *cast)
        # A CPU keeps the buckets of the last schedule: pages that were never touched cost more than the copy into
        # them. On a GPU torch's allocator has them at hand.
        if self._kept is not None and self._kept.key == key:
            return self._kept
        self._kept = None
        rounds = [
            _Round(
                self._messages(self._outgoing, one.sends, lambda move: move.src, cast[0]),
                self._messages(self._incoming, one.receives, lambda move: move.dst, cast[1]),
            )
            for one in rank_rounds(self._plan.traffic, self._rank, capacity)
        ]
        outgoing = self._bucket([one.sends for one in rounds])
        incoming = self._bucket([one.receives for one in rounds])
        prepared = _Prepared(key, rounds, outgoing, incoming)
        if self._device.type == "cpu":
            self._kept = prepared
        return prepared

    def _messages(
        self,
        streams: Mapping[int, MoveStream],
        spans: Mapping[int, Sequence[Span]],
        end_of: Callable[[Move], End],
        cast: frozenset[str],
    ) -> list[_Message]:
        """A round's messages at one end, in the order in which both ends post them."""
        found, at = [], 0
        for peer in spans:
            for parts in _framed(streams[peer].parts(spans[peer]), self._direct_elements):
                ends = [end_of(part.move) for part in parts]
                move, numel = parts[0].move, sum(part.numel for part in parts)
                in_place = len(parts) == 1 and move.in_one_run(ends[0]) and ends[0].storage not in cast
                found.append(_Message(peer, parts, ends, None if in_place else slice(at, at + numel)))
                at += 0 if in_place else numel
        return found

    def _bucket(self, rounds: Sequence[Sequence[_Message]]) -> list[torch.Tensor]:
        """Shares, each large enough for every round that uses it."""
        sizes = [max((m.stretch.stop for m in messages if m.stretch is not None), default=0) for messages in rounds]
        return [
            torch.empty(max(sizes[slot::_SLOTS]), dtype=self._dtype, device=self._device)
            for slot in range(min(_SLOTS, len(sizes)))
        ]

    def _rounds(self, ready: _Prepared, src: Storages, dst: Storages, failure: _Failure) -> None:
        rounds = enumerate(ready.rounds)
        under_way = deque(self._post(ready, *one, src, dst, failure) for one in islice(rounds, _SLOTS))
        failure.guard(lambda: copy_local(self._local, src, dst, self._dtype))
        for one in rounds:
            self._finish(ready, *under_way.popleft(), dst, failure)
            under_way.append(self._post(ready, *one, src, dst, failure))
        while under_way:
            self._finish(ready, *under_way.popleft(), dst, failure)

    def _post(
        self, ready: _Prepared, number: int, one: _Round, src: Storages, dst: Storages, failure: _Failure
    ) -> tuple[int, _Round, list[dist.Work]]:
        into, outgoing = ready.incoming[number % _SLOTS], ready.outgoing[number % _SLOTS]
        ops = [dist.P2POp(dist.irecv, m.buffer(dst, into), m.peer, self._group) for m in one.receives]
        for message in one.sends:
            if message.stretch is not None:
                failure.guard(lambda: _gather(outgoing[message.stretch], message.views(src)))  # noqa: B023
            ops.append(dist.P2POp(dist.isend, message.buffer(src, outgoing), message.peer, self._group))
        return number, one, dist.batch_isend_irecv(ops)

    def _finish(
        self, ready: _Prepared, number: int, one: _Round, works: list[dist.Work], dst: Storages, failure: _Failure
    ) -> None:
        for work in works:
            work.wait()
        into = ready.incoming[number % _SLOTS]
        for message in one.receives:
            if message.stretch is not None:
                failure.guard(lambda: _scatter(into[message.stretch], message.views(dst)))  # noqa: B023

    def _agree(self, error: Exception | None) -> None:
        failed = torch.tensor(int(error is not None), device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if not failed:
            return
        said: list[str | None] = [None] * dist.get_world_size(self._group)
        mine = None if error is None else f"rank {self._rank}: {type(error).__name__}: {error}"
        dist.all_gather_object(said, mine, group=self._group)
        raise TransferError("; ".join(text for text in said if text)) from error


def carry_over_group(
    plan: CopyPlan,
    src: Storages,
    dst: Storages,
    *,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Carries a plan once; see `Resharder`. Every rank of the group calls it."""
    Resharder(plan, rank=rank, dtype=dtype, device=device, group=group, bucket_bytes=bucket_bytes).run(src, dst)


def _framed(parts: Iterable[Part], least: int) -> Iterator[list[Part]]:
    """The messages that carry these parts: all that is small or strided at both ends, then each of the rest alone."""
    together: list[Part] = []
    alone: list[Part] = []
    for part in parts:
        move = part.move
        direct = part.numel >= least and (move.in_one_run(move.src) or move.in_one_run(move.dst))
        (alone if direct else together).append(part)
    if together:
        yield together
    yield from ([part] for part in alone)


def _gather(message: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    _copy_all(_split_like(message, sources), sources)


def _scatter(message: torch.Tensor, destinations: Sequence[torch.Tensor]) -> None:
    _copy_all(destinations, _split_like(message, destinations))


def _split_like(message: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    stretches = message.split([view.numel() for view in views])
    return [stretch.view(view.shape) for stretch, view in zip(stretches, views, strict=True)]


def _copy_all(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Flat ones apart: a single strided pair makes torch copy the whole list one by one on a GPU."""
    pairs = list(zip(into, values, strict=True))
    for chosen in ([p for p in pairs if p[0].dim() == 1], [p for p in pairs if p[0].dim() != 1]):
        if chosen:
            torch._foreach_copy_([a for a, _ in chosen], [b for _, b in chosen])


def _of_other_dtype(storages: Storages, dtype: torch.dtype) -> Iterator[str]:
    return (name for name, tensor in storages.items() if tensor.dtype != dtype)


def _check_all_there(
    local: Sequence[Copy], outgoing: Iterable[MoveStream], incoming: Iterable[MoveStream], src: Storages, dst: Storages
) -> None:
    used_src = {copy.src_storage for copy in local} | {move.src.storage for s in outgoing for move in s.moves}
    used_dst = {copy.dst_storage for copy in local} | {move.dst.storage for s in incoming for move in s.moves}
    for what, used, given in (("source", used_src, src), ("destination", used_dst, dst)):
        if missing := sorted(used - given.keys()):
            raise ValueError(f"{what} storages the plan uses are missing: {', '.join(missing[:5])} ({len(missing)})")
