"""The certificate of a transfer: that every destination, replicas included, holds the sources' present values.

Digests by logical tensor, independent of the layout, summed over all ranks; where they differ, by box.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.weights.carry import Storages
from megarlhf.weights.digest import compare, digest_boxes, replica_digests, transfer_digests, whole_digest
from megarlhf.weights.placement import Box, RankPlacements, Shape
from megarlhf.weights.plan import Copy, CopyPlan

_MAX_LISTED = 5

_At = tuple[str, int, Box]
"""(logical tensor, destination rank, box)."""


class CertificateError(RuntimeError):
    """Destinations do not hold what the sources hold. The same on every rank."""


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
    tensors: Mapping[str, Shape],
    src: Storages,
    dst: Storages,
    *,
    rank: int,
    dtype: torch.dtype,
    version: int,
    group: dist.ProcessGroup | None = None,
    problems: Sequence[str] = (),
) -> Certificate:
    """Compares what lies in `dst` on all ranks with what lies in `src`, cast to `dtype`. Collective.

    `sources` are the placements of all source ranks, `tensors` the shapes of all logical tensors. `problems`: what this
    rank has found wrong by itself; raised on all ranks.

    Raises: CertificateError naming tensors, ranks and boxes.
    """
    start = time.perf_counter()
    told: list[Sequence[str]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(told, tuple(problems), group=group)
    said = [problem for each in told for problem in each]
    if said:  # what cannot be read has no digest
        raise CertificateError(f"weight version {version}: {'; '.join(said)}")
    sent, received = transfer_digests(plan, tensors, src, dst, rank=rank, dtype=dtype, group=group)
    if different := compare(sent, received):
        places = _places(plan, tensors, src, dst, rank, dtype, group, set(different))
        said.append(f"{len(different)} of {len(sent)} tensors differ: {'; '.join(_listed(places))}")
    once, agreed = replica_digests(rank, sources, tensors, src, dtype=dtype, group=group)
    if divided := compare(once, agreed):
        said.append(f"the trainer's own ranks disagree on {len(divided)} tensors: {', '.join(divided[:_MAX_LISTED])}")
    if said:
        raise CertificateError(f"weight version {version}: {'; '.join(said)}")
    return Certificate(version, whole_digest(once), time.perf_counter() - start)


def _places(
    plan: CopyPlan,
    tensors: Mapping[str, Shape],
    src: Storages,
    dst: Storages,
    rank: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    different: set[str],
) -> list[_At]:
    """Which boxes differ, of these tensors."""
    copies = [c for c in plan.copies if c.tensor in different and rank in (c.src_rank, c.dst_rank)]
    sent = _by_box((c for c in copies if c.src_rank == rank), tensors, src, dtype, sent=True)
    received = _by_box((c for c in copies if c.dst_rank == rank), tensors, dst, dtype, sent=False)
    told: list[tuple[dict[_At, int], dict[_At, int]]] = [({}, {})] * dist.get_world_size(group)
    dist.all_gather_object(told, (sent, received), group=group)
    everywhere = {at: digest for outgoing, _ in told for at, digest in outgoing.items()}
    return sorted(at for _, incoming in told for at, digest in incoming.items() if everywhere[at] != digest)


def _by_box(
    copies: Iterable[Copy], tensors: Mapping[str, Shape], storages: Storages, dtype: torch.dtype, *, sent: bool
) -> dict[_At, int]:
    return {
        (c.tensor, c.dst_rank, c.box): digest_boxes([c.source if sent else c.destination], tensors, storages, dtype)[
            c.tensor
        ]
        for c in copies
    }


def _listed(places: Sequence[_At]) -> list[str]:
    lines = [
        f"{tensor}[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}] on rank {rank}"
        for tensor, rank, box in places[:_MAX_LISTED]
    ]
    return lines + ([f"and {len(places) - _MAX_LISTED} more boxes"] if len(places) > _MAX_LISTED else [])
