"""The resharder: carries a copy plan over a process group into live memory, again and again.

What lies in one piece at both ends, and is large, is sent and received where it lies. The rest travels in rounds: one
message per peer and round, gathered into a bucket and scattered from another, while the round before is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

_MIN_BUCKET_BYTES = 1 << 20
_SLOTS = 8
"""Rounds under way at a time, each with its share of the buckets: gathering, wire and scattering overlap, and a share
stays in the cache on a CPU."""

Peers = Mapping[int, Sequence[Copy]]


class TransferError(RuntimeError):
    """A transfer failed on some rank, so the destinations hold a mixture. Raised on every rank."""


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

    def flat(self, placement: Placement, storages: Storages, scratch: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The placement's memory, one run; after a failure scratch memory in its place."""
        found: list[torch.Tensor] = []
        self.guard(lambda: found.append(view(placement, storages).view(-1)))
        return found[0] if found else scratch(placement.box.numel)


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
        self._kept: tuple[Sequence[Exchange], list[torch.Tensor], list[torch.Tensor]] | None = None
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

        Raises: TransferError on every rank when any rank failed, with the reason; the destinations are then a mixture.
        """
        failure = _Failure()
        capacity = self._capacity()
        try:
            under_way = self._post_direct(src, dst, failure)
            failure.guard(lambda: copy_local(self._local, src, dst, self._dtype))
            self._rounds(self._staged.exchanges(self._rank, capacity), src, dst, failure)
            for work in under_way:
                work.wait()
        except RuntimeError as error:  # of the network: nobody can be told any more
            reason = failure.error or error
            raise TransferError(f"rank {self._rank}: {type(reason).__name__}: {reason}") from reason
        self._agree(failure.error)

    def _capacity(self) -> int:
        """Elements of a round: its share of the bucket for sending, and of that for receiving.

        By powers of two below `bucket_bytes`, the same on all ranks, so that few schedules are made.
        """
        size = self._bucket_bytes
        if self._free_bytes is not None:
            free = torch.tensor(self._free_bytes(), device=self._device)
            dist.all_reduce(free, op=dist.ReduceOp.MIN, group=self._group)
            while size > max(int(free) // 4, _MIN_BUCKET_BYTES):
                size //= 2
        return max(1, size // _SLOTS // self._dtype.itemsize)

    def _post_direct(self, src: Storages, dst: Storages, failure: _Failure) -> list[dist.Work]:
        ops = []
        for peer, copy in self._receives:
            where = failure.flat(copy.destination, dst, self._empty)
            ops.append(dist.P2POp(dist.irecv, where, peer, self._group))
        for peer, copy in self._sends:
            ops.append(dist.P2POp(dist.isend, failure.flat(copy.source, src, self._empty), peer, self._group))
        return dist.batch_isend_irecv(ops) if ops else []

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def _rounds(self, exchanges: Sequence[Exchange], src: Storages, dst: Storages, failure: _Failure) -> None:
        slots = min(_SLOTS, len(exchanges))
        outgoing, incoming = self._buckets(exchanges, slots)
        under_way: deque[tuple[Exchange, torch.Tensor, list[dist.Work]]] = deque()
        for number, exchange in enumerate(exchanges):
            if len(under_way) == slots:
                self._finish(*under_way.popleft(), dst, failure)
            into = incoming[number % slots]
            under_way.append((exchange, into, self._post(exchange, src, outgoing[number % slots], into, failure)))
        while under_way:
            self._finish(*under_way.popleft(), dst, failure)

    def _buckets(self, exchanges: Sequence[Exchange], slots: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For sending and for receiving. A CPU keeps those of the last schedule: pages that were never touched cost
        more than the copy into them. On a GPU torch's allocator has them at hand."""
        if self._kept is None or self._kept[0] is not exchanges:
            outgoing = [self._bucket([e.sends for e in exchanges[k::slots]]) for k in range(slots)]
            incoming = [self._bucket([e.receives for e in exchanges[k::slots]]) for k in range(slots)]
            if self._device.type != "cpu":
                return outgoing, incoming
            self._kept = (exchanges, outgoing, incoming)
        return self._kept[1:]

    def _bucket(self, rounds: Sequence[Peers]) -> torch.Tensor:
        size = max((sum(c.numel for copies in peers.values() for c in copies) for peers in rounds), default=0)
        return self._empty(size)

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
