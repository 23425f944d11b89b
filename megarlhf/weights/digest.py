"""Digests of logical tensors that do not depend on the layout: the certificate of a transport.

digest = sum over elements of mix(flat index in the logical tensor, bit pattern) mod 2^64, so that digests of
disjoint boxes add up and any move, loss or change of an element shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megarlhf.weights.carry import Storages, view
from megarlhf.weights.placement import Box, Placement, RankPlacements, Shape, contiguous_strides, flat_boxes
from megarlhf.weights.plan import CopyPlan, make_plan
from megarlhf.weights.tensor_map import identity_placements

_CHUNK_ELEMENTS = 1 << 22
_CHUNK_ELEMENTS_CPU = 1 << 17  # fits the cache: five times as fast as 4 M on one core
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of a dtype's size, to compare bits."""
_NOBODY = -1


@torch.no_grad()
def digest_boxes(
    placements: Iterable[Placement], tensors: Mapping[str, Shape], storages: Storages, dtype: torch.dtype
) -> dict[str, int]:
    """Digest of the given placements' elements by logical tensor, cast to `dtype` first.

    `tensors` gives the full logical shapes. Elements that stand in two placements count twice: choose the
    placements with `owned_placements`. Extra memory is a few chunks of at most 4 M int64.
    """
    totals: dict[str, torch.Tensor] = {}
    for placement in placements:
        on_cpu = storages[placement.storage].is_cpu
        for box in _chunks(placement, _CHUNK_ELEMENTS_CPU if on_cpu else _CHUNK_ELEMENTS):
            values = view(placement.part(box), storages)
            total = _mixed_sum(values.to(dtype), box.start, tensors[placement.tensor])
            totals.setdefault(placement.tensor, torch.zeros_like(total)).add_(total)
    return {tensor: int(total) % 2**64 for tensor, total in totals.items()}


def _chunks(placement: Placement, limit: int) -> list[Box]:
    """The placement's box in boxes of at most `limit` elements."""
    size = placement.box.numel
    return [
        box.shift(placement.box.start)
        for start in range(0, size, limit)
        for box in flat_boxes(placement.box.shape, start, min(start + limit, size))
    ]


def owned_placements(rank: int, replica: Sequence[RankPlacements]) -> tuple[Placement, ...]:
    """The part of the model that `rank` answers for, among ranks that together hold all of it.

    Every element has one owner: the one from which a plan would send it to a stranger.

    Raises: ValueError when the ranks lack a part of a tensor they hold.
    """
    tensors: dict[str, Shape] = {}
    for part in replica:
        tensors.update(part.tensors)
    plan = make_plan(replica, [identity_placements(tensors, _NOBODY)], only_rank=rank)
    return tuple(copy.source for copies in plan.sends(rank).values() for copy in copies)


def model_digest(
    rank: int,
    replica: Sequence[RankPlacements],
    storages: Storages,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> dict[str, int]:
    """Digest of every logical tensor, each element counted once over the ranks of `replica`.

    `replica` are the ranks that together hold the model once (an engine's; one trainer replica's), the same
    list on each; `group` is exactly these ranks (the default group if None; no communication if alone). Only
    owners are read: a stale replica of a norm or of a KV head is found by `transfer_digests`.
    """
    names = sorted({tensor for part in replica for tensor in part.tensors})
    tensors = {tensor: shape for part in replica for tensor, shape in part.tensors.items()}
    partial = digest_boxes(owned_placements(rank, replica), tensors, storages, dtype)
    if len(replica) == 1:
        return {name: partial.get(name, 0) for name in names}
    (total,) = summed([partial], names, next(iter(storages.values())).device, group)
    return total


def transfer_digests(
    plan: CopyPlan, tensors: Mapping[str, Shape], src: Storages, dst: Storages, *, rank: int, dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, int]]:
    """This rank's part of (what the sources hold, what the destinations hold), for every copy of the plan.

    `summed` over all ranks they are equal when the destinations, all replicas included, have received the sources'
    present values cast to `dtype`. `tensors` gives the shapes of all logical tensors of the plan.
    """
    outgoing = [c.source for c in plan.local(rank)] + [c.source for s in plan.sends(rank).values() for c in s]
    incoming = [c.destination for c in plan.local(rank)]
    incoming += [c.destination for s in plan.receives(rank).values() for c in s]
    return _counted(outgoing, tensors, src, dtype), digest_boxes(incoming, tensors, dst, dtype)


def _counted(
    placements: Iterable[Placement], tensors: Mapping[str, Shape], storages: Storages, dtype: torch.dtype
) -> dict[str, int]:
    """`digest_boxes`, computing a box that is sent to several replicas once."""
    times: dict[Placement, int] = {}
    for placement in placements:
        times[placement] = times.get(placement, 0) + 1
    return combine(
        *(
            {t: d * n for t, d in digest_boxes([placement], tensors, storages, dtype).items()}
            for placement, n in times.items()
        )
    )


def combine(*digests: Mapping[str, int]) -> dict[str, int]:
    """The digest of the union of disjoint boxes."""
    total: dict[str, int] = {}
    for part in digests:
        for tensor, value in part.items():
            total[tensor] = (total.get(tensor, 0) + value) % 2**64
    return total


def whole_digest(tensors: Mapping[str, int]) -> str:
    """One number for a model, as 16 hex digits: names count, their order does not."""
    total = 0
    for name, digest in tensors.items():
        mixed = digest
        for byte in name.encode():
            mixed = (mixed * 0x100000001B3 ^ byte) % 2**64
        total = (total + mixed * 0x9E3779B97F4A7C15) % 2**64
    return f"{total:016x}"


def replica_digests(
    rank: int,
    sources: Sequence[RankPlacements],
    tensors: Mapping[str, Shape],
    storages: Storages,
    *,
    dtype: torch.dtype,
) -> tuple[dict[str, int], dict[str, int]]:
    """This rank's part of (digest of every tensor by the first rank that holds each box, the same if all agree).

    `summed` over the ranks of `sources` the second is what all holders together say, brought to the weight of one:
    equal to the first when replicas, those of data parallelism and of tied embeddings included, hold the same. Boxes
    of different ranks are equal or disjoint.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for part in sources:
        for placement in part.placements:
            holders.setdefault((placement.tensor, placement.box), []).append(part.rank)
    mine = next(part for part in sources if part.rank == rank)
    first: dict[str, int] = {}
    agreed: dict[str, int] = {}
    for placement in mine.placements:
        at = holders[placement.tensor, placement.box]
        name, digest = placement.tensor, digest_boxes([placement], tensors, storages, dtype)[placement.tensor]
        if at[0] == rank:
            first[name] = (first.get(name, 0) + digest) % 2**64
        # The first holder counts for all, each of the others against it: once together, if they agree.
        weight = len(at) if at[0] == rank else -1
        agreed[name] = (agreed.get(name, 0) + weight * digest) % 2**64
    return first, agreed


def compare(a: Mapping[str, int], b: Mapping[str, int]) -> list[str]:
    """Names of the tensors that differ or that only one side has, sorted."""
    return sorted(t for t in a.keys() | b.keys() if t not in a or t not in b or a[t] != b[t])


def summed(
    parts: Sequence[Mapping[str, int]],
    names: Sequence[str],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[dict[str, int]]:
    """The sum over all ranks of each of several digests; names that a rank lacks count as 0. Collective."""
    signed = [[_signed(part.get(name, 0)) for name in names] for part in parts]
    sums = torch.tensor(signed, dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    return [{name: value % 2**64 for name, value in zip(names, row, strict=True)} for row in sums.tolist()]


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mixed_sum(values: torch.Tensor, start: Shape, shape: Shape) -> torch.Tensor:
    """Sum of mix(mix(flat index) + bits) over a box of a logical tensor, in wrapping int64."""
    bits = values.contiguous().view(BITS[values.element_size()]).to(torch.int64)
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, (first, step) in enumerate(zip(start, contiguous_strides(shape), strict=True)):
        along = torch.arange(first, first + values.shape[dim], device=values.device) * step
        index = index + along.view(-1, *([1] * (values.dim() - dim - 1)))
    mixed = _finalise(_finalise(index * _GOLDEN + _GOLDEN).add_(bits.mul_(_GOLDEN)))
    return mixed.sum()


def _finalise(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in place; shifts are made logical by a mask."""
    for shift, factor in _MIX:
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
