"""The certificate of a transfer: that every destination, replicas included, holds the sources' present values.

Digests by logical tensor, independent of the layout, summed over all ranks; where they differ, by box.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.together import FailingTogether
from megarlhf.weights.carry import Storages
from megarlhf.weights.digest import compare, digest_boxes, replica_digests, summed, times_held, whole_digest
from megarlhf.weights.placement import Box, RankPlacements
from megarlhf.weights.plan import Copy, CopyPlan

_MAX_LISTED = 5

_At = tuple[str, int, Box]
"""(logical tensor, destination rank, box)."""
_ByBox = tuple[dict[_At, int], dict[_At, int]]
"""Digests of what this rank has sent, and of what it has received."""


class CertificateError(RuntimeError):
    """Destinations do not hold what the sources hold, or it could not be found out. Raised on every rank."""


@dataclass(frozen=True)
class Certificate:
    """What was proven."""

    version: int
    """Of the weights."""
    digest: str
    """Of the whole model in the dtype that travelled, 16 hex digits: the same at every layout of either side."""
    seconds: float
    """What the proof took on this rank."""


def certify(
    plan: CopyPlan,
    sources: Sequence[RankPlacements],
    destinations: Sequence[RankPlacements],
    src: Storages,
    dst: Storages,
    *,
    rank: int,
    dtype: torch.dtype,
    version: int,
    group: dist.ProcessGroup | None = None,
) -> Certificate:
    """Compares what lies in `dst` on all ranks with what lies in `src`, cast to `dtype`. Collective.

    The digest of a tensor, by the first rank of the trainer that holds each box, is compared with what all others of
    the trainer hold, and, as often as the destinations hold it, with what they hold. `sources` and `destinations` are
    the placements of all ranks, `plan` the one between them; it plays a part only in naming what differs.

    Raises: CertificateError naming tensors, ranks and boxes that differ, or what failed on which rank.
    """
    start = time.perf_counter()

    def refused(reasons: Sequence[str]) -> CertificateError:
        return CertificateError(f"weight version {version}: {'; '.join(reasons)}")

    with FailingTogether(refused, group):
        device = next(tensor.device for tensor in (*src.values(), *dst.values()))
        times = times_held(destinations)
        held = replica_digests(rank, sources, src, dtype=dtype)
        mine = next((part.placements for part in destinations if part.rank == rank), ())
        carried = digest_boxes(mine, dst, dtype)
    once, agreed, received = summed([*held, carried], sorted(times), device, group)
    said = []
    if different := compare({name: digest * times[name] % 2**64 for name, digest in once.items()}, received):
        with FailingTogether(refused, group):
            digests = _digests_by_box(plan, src, dst, rank, dtype, set(different))
        places = _listed(_places(digests, group)) or different[:_MAX_LISTED]
        said.append(f"{len(different)} of {len(once)} tensors differ: {'; '.join(places)}")
    if divided := compare(once, agreed):
        said.append(f"the trainer's own ranks disagree on {len(divided)} tensors: {', '.join(divided[:_MAX_LISTED])}")
    if said:
        raise refused(said)
    return Certificate(version, whole_digest(once), time.perf_counter() - start)


def _digests_by_box(
    plan: CopyPlan, src: Storages, dst: Storages, rank: int, dtype: torch.dtype, different: set[str]
) -> _ByBox:
    copies = [c for c in plan.copies if c.tensor in different and rank in (c.src_rank, c.dst_rank)]
    sent = _by_box((c for c in copies if c.src_rank == rank), src, dtype, sent=True)
    received = _by_box((c for c in copies if c.dst_rank == rank), dst, dtype, sent=False)
    return sent, received


def _places(mine: _ByBox, group: dist.ProcessGroup | None) -> list[_At]:
    """Which boxes differ, on all ranks. Collective."""
    told = [mine] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    everywhere = {at: digest for outgoing, _ in told for at, digest in outgoing.items()}
    return sorted(at for _, incoming in told for at, digest in incoming.items() if everywhere.get(at) != digest)


def _by_box(copies: Iterable[Copy], storages: Storages, dtype: torch.dtype, *, sent: bool) -> dict[_At, int]:
    return {
        (c.tensor, c.dst_rank, c.box): digest_boxes([c.source if sent else c.destination], storages, dtype)[c.tensor]
        for c in copies
    }


def spoilt_padding(placements: RankPlacements, storages: Storages) -> list[str]:
    """Storages whose padding, which no transfer writes and everybody leaves at zero, holds something else."""
    found = []
    for name, gaps in placements.padding().items():
        flat = storages[name].detach().view(-1)
        if count := sum(int((flat[start:stop] != 0).sum()) for start, stop in gaps):
            found.append(f"{name}: {count} of {sum(b - a for a, b in gaps)} elements of its padding are not zero")
    return found


def _listed(places: Sequence[_At]) -> list[str]:
    lines = [
        f"{tensor}[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}] on rank {rank}"
        for tensor, rank, box in places[:_MAX_LISTED]
    ]
    return lines + ([f"and {len(places) - _MAX_LISTED} more boxes"] if len(places) > _MAX_LISTED else [])
