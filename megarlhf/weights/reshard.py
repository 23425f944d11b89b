"""The resharder: carries a copy plan over a process group into live memory, again and again.

What lies in one piece at both ends, and is large, is sent and received where it lies. The rest travels in rounds: one
message per peer and round, gathered into a bucket and scattered from another, while the round before is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from megarlhf.weights.carry import Storages, copy_local, view
from megarlhf.weights.placement import Placement, Shape
from megarlhf.weights.plan import Copy, CopyPlan, Exchange
from megarlhf.weights.schedule import Pair

BUCKET_BYTES = 256 << 20
DIRECT_BYTES = 128 << 10
"""A message costs some 50 us over gloo; twice as long as so many bytes take."""

_MIN_BUCKET_BYTES = 16 << 20
"""Smaller ones make schedules of tens of thousands of rounds for a large model."""
_SLOTS = 8
"""Rounds under way at a time, each with its share of the buckets: gathering, wire and scattering overlap, and a share
stays in the cache on a CPU."""

Peers = Mapping[int, Sequence[Copy]]


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


@dataclass(frozen=True)
class _Prepared:
    """What a run needs on this rank before the first message, so that want of it is told before anything is written."""

    direct: list[dist.P2POp]
    exchanges: Sequence[Exchange]
    outgoing: list[torch.Tensor]
    """A share of the bucket for each round that may be under way."""
    incoming: list[torch.Tensor]


class Resharder:
    """Executes one plan among the ranks of a group, each of which makes one: a collective call, as `run` is."""

    def __init__(
        self,
        plan: CopyPlan,
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        in_place: bool,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        direct_bytes: int = DIRECT_BYTES,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Values travel in `dtype`, local ones too, and are then cast to the destination's. Ranks in plans are global.

        `in_place`: all of this rank's storages, sources and destinations, are of `dtype`. `bucket_bytes` bounds what a
        rank has gathered, and what it receives to scatter, at any moment. `free_bytes` says what the device has left:
        buckets together take at most half of it.
        """
        self._rank, self._dtype, self._device, self._group = rank, dtype, device, group
        self._bucket_bytes, self._free_bytes = bucket_bytes, free_bytes
        self._kept: _Prepared | None = None
        least = max(1, direct_bytes // dtype.itemsize)
        direct = _direct_traffic(plan, rank, least, in_place, group)
        is_direct = _never if direct is None else partial(_one_run, least=least)
        self._local = plan.local(rank)
        self._sends = [(peer, c) for peer, copies in plan.sends(rank).items() for c in copies if is_direct(c)]
        self._receives = [(peer, c) for peer, copies in plan.receives(rank).items() for c in copies if is_direct(c)]
        traffic = {pair: n - (direct or {}).get(pair, 0) for pair, n in plan.traffic.items()}
        rest = tuple(c for c in plan.copies if c.src_rank != c.dst_rank and not is_direct(c))
        self._staged = CopyPlan(rest, {pair: n for pair, n in traffic.items() if n}, plan.only_rank)

    @torch.no_grad()
    def run(self, src: Storages, dst: Storages) -> None:
        """Carries everything once. Afterwards every destination box holds its source's present values.

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
            under_way = dist.batch_isend_irecv(ready.direct) if ready.direct else []
            failure.guard(lambda: copy_local(self._local, src, dst, self._dtype))
            self._rounds(ready, src, dst, failure)
            for work in under_way:
                work.wait()
        except RuntimeError as error:  # of the network: what happens here of our own is guarded
            reason = failure.error or error
            raise TransferError(f"rank {self._rank}: {type(reason).__name__}: {reason}") from reason
        self._agree(failure.error)

    def _least_free(self, failure: _Failure) -> int | None:
        """Bytes, of the poorest rank; buckets that are kept count as free. Collective."""
        if self._free_bytes is None:
            return None
        found = [0]
        failure.guard(lambda: found.append(self._free_bytes() + self._kept_bytes()))  # type: ignore[misc]
        free = torch.tensor(found[-1], device=self._device)
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=self._group)
        return int(free)

    def _kept_bytes(self) -> int:
        return 0 if self._kept is None else sum(t.nbytes for t in (*self._kept.outgoing, *self._kept.incoming))

    def _capacity(self, free: int | None) -> int:
        """Elements of a round: its share of the bucket for sending, and of that for receiving.

        By powers of two below `bucket_bytes`, the same on all ranks, so that few schedules are made.
        """
        size = self._bucket_bytes
        while free is not None and size > max(free // 4, _MIN_BUCKET_BYTES):
            size //= 2
        return max(1, size // _SLOTS // self._dtype.itemsize)

    def _prepare(self, src: Storages, dst: Storages, capacity: int) -> _Prepared:
        ops = [dist.P2POp(dist.irecv, _flat(c.destination, dst), peer, self._group) for peer, c in self._receives]
        ops += [dist.P2POp(dist.isend, _flat(c.source, src), peer, self._group) for peer, c in self._sends]
        exchanges = self._staged.exchanges(self._rank, capacity)
        # A CPU keeps the buckets of the last schedule: pages that were never touched cost more than the copy into
        # them. On a GPU torch's allocator has them at hand.
        if self._kept is not None and self._kept.exchanges is exchanges:
            return replace(self._kept, direct=ops)
        self._kept = None
        slots = min(_SLOTS, len(exchanges))
        outgoing = [self._bucket([e.sends for e in exchanges[k::slots]]) for k in range(slots)]
        incoming = [self._bucket([e.receives for e in exchanges[k::slots]]) for k in range(slots)]
        prepared = _Prepared(ops, exchanges, outgoing, incoming)
        if self._device.type == "cpu":
            self._kept = replace(prepared, direct=[])
        return prepared

    def _rounds(self, ready: _Prepared, src: Storages, dst: Storages, failure: _Failure) -> None:
        slots = len(ready.outgoing)
        under_way: deque[tuple[Exchange, torch.Tensor, list[dist.Work]]] = deque()
        for number, exchange in enumerate(ready.exchanges):
            if len(under_way) == slots:
                self._finish(*under_way.popleft(), dst, failure)
            into = ready.incoming[number % slots]
            under_way.append((exchange, into, self._post(exchange, src, ready.outgoing[number % slots], into, failure)))
        while under_way:
            self._finish(*under_way.popleft(), dst, failure)

    def _bucket(self, rounds: Sequence[Peers]) -> torch.Tensor:
        size = max((sum(c.numel for copies in peers.values() for c in copies) for peers in rounds), default=0)
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def _post(
        self, exchange: Exchange, src: Storages, outgoing: torch.Tensor, into: torch.Tensor, failure: _Failure
    ) -> list[dist.Work]:
        ops = [dist.P2POp(dist.irecv, m, peer, self._group) for peer, _, m in _messages(exchange.receives, into)]
        for peer, copies, message in _messages(exchange.sends, outgoing):
            failure.guard(lambda: _gather(message, copies, src))  # noqa: B023
            ops.append(dist.P2POp(dist.isend, message, peer, self._group))
        return dist.batch_isend_irecv(ops)

    def _finish(
        self, exchange: Exchange, into: torch.Tensor, works: list[dist.Work], dst: Storages, failure: _Failure
    ) -> None:
        for work in works:
            work.wait()
        for _, copies, message in _messages(exchange.receives, into):
            failure.guard(lambda: _scatter(message, copies, dst))  # noqa: B023

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
    in_place = all(tensor.dtype == dtype for tensor in (*src.values(), *dst.values()))
    resharder = Resharder(
        plan, rank=rank, dtype=dtype, device=device, in_place=in_place, group=group, bucket_bytes=bucket_bytes
    )
    resharder.run(src, dst)


def _flat(placement: Placement, storages: Storages) -> torch.Tensor:
    """The placement's memory, which is one run."""
    return view(placement, storages).view(-1)


def _gather(message: torch.Tensor, copies: Sequence[Copy], src: Storages) -> None:
    torch._foreach_copy_(_parts(message, copies), [view(c.source, src) for c in copies])


def _scatter(message: torch.Tensor, copies: Sequence[Copy], dst: Storages) -> None:
    torch._foreach_copy_([view(c.destination, dst) for c in copies], _parts(message, copies))


def _parts(message: torch.Tensor, copies: Sequence[Copy]) -> list[torch.Tensor]:
    stretches = message.split([copy.numel for copy in copies])
    return [stretch.view(copy.shape) for stretch, copy in zip(stretches, copies, strict=True)]


def _messages(peers: Peers, bucket: torch.Tensor) -> Iterator[tuple[int, Sequence[Copy], torch.Tensor]]:
    """(peer, its copies, its stretch of the bucket)."""
    at = 0
    for peer, copies in peers.items():
        size = sum(copy.numel for copy in copies)
        yield peer, copies, bucket[at : at + size]
        at += size


def _direct_traffic(
    plan: CopyPlan, rank: int, least: int, in_place: bool, group: dist.ProcessGroup | None
) -> dict[Pair, int] | None:
    """Elements by pair that need no bucket, of all ranks; None when some rank has to cast. Collective."""
    mine = {s: sum(c.numel for c in copies if _one_run(c, least)) for s, copies in plan.receives(rank).items()}
    told: list[tuple[bool, dict[int, int]]] = [(False, {})] * dist.get_world_size(group)
    dist.all_gather_object(told, (in_place, mine), group=group)
    if not all(whole for whole, _ in told):
        return None
    ranks = dist.get_process_group_ranks(group)
    return {(s, d): n for d, (_, by) in zip(ranks, told, strict=True) for s, n in by.items() if n}


def _one_run(copy: Copy, least: int) -> bool:
    """Whether the box is one run of memory at both ends, and worth a message of its own."""
    return copy.numel >= least and all(_is_packed(copy.shape, s) for s in (copy.src_strides, copy.dst_strides))


def _never(copy: Copy) -> bool:
    return False


def _is_packed(shape: Shape, strides: Shape) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
