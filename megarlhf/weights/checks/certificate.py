"""The certificate of a transfer: that every destination, replicas included, holds the sources' present values.

Digests by logical tensor, independent of the layout, summed over all ranks; where they differ, by box.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.placement import Box, Placement, RankPlacements
from megarlhf.weights.checks.digest import compare, digest_boxes, replica_counts, replica_digests, summed, whole_digest
from megarlhf.weights.plan.copy_plan import CopyPlan
from megarlhf.weights.transport.storages import Storages

_MAX_LISTED = 5

_At = tuple[str, int, Box]
"""(logical tensor, rank that has it, box)."""


@dataclass(frozen=True)
class _ByBox:
    """Digests on one rank: of what it sends and receives by the plan, and of what the trainer has there."""

    sent: dict[_At, int]
    received: dict[_At, int]
    trainer: dict[_At, int]


class CertificateError(RuntimeError):
    """Destinations do not hold what the sources hold, or it could not be found out. Raised on every rank."""


@dataclass(frozen=True)
class Certificate:
    """Proof that the engine has the trainer's weights."""

    version: int
    """Version of the weights."""
    digest: str
    """Digest of the whole model in the dtype that was sent, 16 hex digits: the same at every layout of either side."""
    seconds: float
    """Time of the proof on this rank."""


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
    """Compare the contents of `dst` on all ranks with those of `src`, cast to `dtype`. Collective.

    The digest of a tensor, by the first rank of the trainer that holds each box, is compared with what all others of
    the trainer hold, and, as often as the destinations hold it, with what they hold. `sources` and `destinations` are
    the placements of all ranks, `plan` the one between them; it plays a part only in naming what differs. Padding is
    left to `nonzero_padding`.

    Raises: CertificateError naming tensor, rank and box of what differs, or what failed on which rank.
    """
    start = time.perf_counter()

    def refused(reasons: Sequence[str]) -> CertificateError:
        return CertificateError(f"weight version {version}: {'; '.join(reasons)}")

    with raise_on_all_ranks(refused, group) as problems:
        device = next(tensor.device for tensor in (*src.values(), *dst.values()))
        times = replica_counts(destinations)
        src_digests = replica_digests(rank, sources, src, dtype=dtype)
        dst_placements = next((part.placements for part in destinations if part.rank == rank), ())
        dst_digests = digest_boxes(dst_placements, dst, dtype)
        problems += _beyond(dst, dtype)
    once, agreed, received = summed([*src_digests, dst_digests], sorted(times), device, group)
    different = compare({name: digest * times[name] % 2**64 for name, digest in once.items()}, received)
    divided = compare(once, agreed)
    if different or divided:
        with raise_on_all_ranks(refused, group):
            src_placements = next(part.placements for part in sources if part.rank == rank)
            boxes = _digests_by_box(plan, src_placements, src, dst, rank, dtype, {*different, *divided})
        raise refused(_differences(boxes, different, divided, group))
    return Certificate(version, whole_digest(once), time.perf_counter() - start)


def _digests_by_box(
    plan: CopyPlan,
    src_placements: Sequence[Placement],
    src: Storages,
    dst: Storages,
    rank: int,
    dtype: torch.dtype,
    tensors: Collection[str],
) -> _ByBox:
    def digest(placement: Placement, storages: Storages) -> int:
        return digest_boxes([placement], storages, dtype)[placement.tensor]

    copies = [copy for copy in plan.copies if copy.tensor in tensors]
    return _ByBox(
        sent={(c.tensor, c.dst_rank, c.box): digest(c.src, src) for c in copies if c.src_rank == rank},
        received={(c.tensor, c.dst_rank, c.box): digest(c.dst, dst) for c in copies if c.dst_rank == rank},
        trainer={(p.tensor, rank, p.box): digest(p, src) for p in src_placements if p.tensor in tensors},
    )


def _differences(
    boxes_here: _ByBox, different: Sequence[str], divided: Sequence[str], group: dist.ProcessGroup | None
) -> list[str]:
    """Sentences on what differs, from all ranks' digests by box. Collective."""
    by_rank = [boxes_here] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, boxes_here, group=group)
    sent = {at: digest for boxes in by_rank for at, digest in boxes.sent.items()}
    wrong_boxes = sorted(at for boxes in by_rank for at, digest in boxes.received.items() if sent.get(at) != digest)
    first: dict[tuple[str, Box], tuple[int, int]] = {}
    unlike = []
    for boxes in by_rank:
        for (tensor, rank, box), digest in boxes.trainer.items():
            first_rank, expected = first.setdefault((tensor, box), (rank, digest))
            if digest != expected:
                unlike.append(f"{_name(tensor, rank, box)}, unlike rank {first_rank}")
    reasons = []
    if wrong_boxes:
        number = len({tensor for tensor, _, _ in wrong_boxes})
        reasons.append(f"{number} tensors differ: {_listed([_name(*at) for at in wrong_boxes])}")
    if divided:
        reasons.append(f"the trainer's own ranks disagree on {len(divided)} tensors: {_listed(unlike)}")
    return reasons or [f"{len(different)} tensors hold something else, in no box of the plan: {_listed(different)}"]


def _name(tensor: str, rank: int, box: Box) -> str:
    return f"{tensor}{box} on rank {rank}"


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return "; ".join([*names[:_MAX_LISTED], *more])


def _beyond(storages: Storages, dtype: torch.dtype) -> list[str]:
    """Storages of a wider dtype that hold what cannot have come in this one; digests are of it."""
    wider = {name: tensor for name, tensor in storages.items() if tensor.dtype != dtype}
    counts = {name: int((tensor != tensor.to(dtype).to(tensor.dtype)).sum()) for name, tensor in wider.items()}
    return [f"{name}: {n} elements are no values of {dtype}" for name, n in counts.items() if n]


def nonzero_padding(placements: RankPlacements, storages: Storages) -> list[str]:
    """Storages whose padding is not zero. No transfer writes padding, and everything else leaves it at zero."""
    problems = []
    for name, gaps in placements.padding().items():
        flat = storages[name].detach().view(-1)
        if count := sum(int((flat[start:stop] != 0).sum()) for start, stop in gaps):
            problems.append(f"{name}: {count} of {sum(b - a for a, b in gaps)} elements of its padding are not zero")
    return problems
