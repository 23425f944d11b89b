"""Digests of logical tensors that do not depend on the layout: the certificate of a transport.

digest = sum over elements of mix(bits) x the product over dimensions of key(dimension, index), mod 2^64, with odd
pseudo-random keys and mix(b) = (b + c)^2. Digests of disjoint boxes add up, and so do those of replicas; any move, loss
or change of an element shows, in dtypes of up to 32 bits; of 64 bits, which no weight travels in, different values can
have equal squares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megarlhf.placement import Box, Placement, RankPlacements
from megarlhf.weights.transport.storages import Storages, view

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of a dtype's size, to compare bits."""


def block_elements(device: torch.device) -> int:
    """Elements to look at together. On a CPU they fit the cache: four to five times as fast as 4 M on one core."""
    return 1 << 17 if device.type == "cpu" else 1 << 22


def first_difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float] | None:
    """The first element that differs bit for bit in tensors of one dtype, counted row-major, and its two values."""
    bits = BITS[a.element_size()]
    different = (a.contiguous().view(bits) != b.contiguous().view(bits)).reshape(-1)
    if not bool(different.any()):
        return None
    element = int(different.to(torch.uint8).argmax())
    return element, a.reshape(-1)[element].item(), b.reshape(-1)[element].item()


class _Keys:
    """The keys of boxes, made once for each range of a dimension."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, torch.device], torch.Tensor] = {}

    def of(self, box: Box, device: torch.device) -> list[torch.Tensor]:
        """Keys of a box by dimension. They are odd, so that no bit of a difference is lost."""
        keys = []
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            at = (dim, start, stop, device)
            if at not in self._made:
                index = torch.arange(start, stop, device=device)
                self._made[at] = _finalise(_finalise(index * _GOLDEN + (dim + 1)) + _GOLDEN) | 1
            keys.append(self._made[at])
        return keys


@torch.no_grad()
def digest_boxes(placements: Iterable[Placement], storages: Storages, dtype: torch.dtype) -> dict[str, int]:
    """Digest of the given placements' elements by logical tensor, cast to `dtype` first.

    Elements that stand in two placements count twice. Extra memory is a few blocks of at most 4 M int64.
    """
    keys = _Keys()
    totals: dict[str, torch.Tensor] = {}
    for placement in placements:
        total = _digest_box(placement, storages, dtype, keys)
        totals[placement.tensor] = totals.get(placement.tensor, 0) + total
    return {tensor: int(total) % 2**64 for tensor, total in totals.items()}


def _digest_box(placement: Placement, storages: Storages, dtype: torch.dtype, keys: _Keys) -> torch.Tensor:
    """Wrapping int64, still on the device."""
    live = storages[placement.storage]
    keyed, first = keys.of(placement.box, live.device), placement.box.start
    sums = []
    for box in placement.box.blocks(block_elements(live.device)):
        chosen = [key[a - f : b - f] for key, a, b, f in zip(keyed, box.start, box.stop, first, strict=True)]
        sums.append(_keyed_sum(view(placement.part(box), storages).to(dtype), chosen))
    return torch.stack(sums).sum()


def whole_digest(tensors: Mapping[str, int]) -> str:
    """One number for a model, as 16 hex digits: names count, their order does not."""
    total = 0
    for name, digest in tensors.items():
        mixed = digest
        for byte in name.encode():
            mixed = (mixed * 0x100000001B3 ^ byte) % 2**64
        total = (total + mixed * 0x9E3779B97F4A7C15) % 2**64
    return f"{total:016x}"


@torch.no_grad()
def replica_digests(
    rank: int, sources: Sequence[RankPlacements], storages: Storages, *, dtype: torch.dtype
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
    on_rank = next(part for part in sources if part.rank == rank)
    keys = _Keys()
    first: dict[str, int] = {}
    agreed: dict[str, int] = {}
    for placement in on_rank.placements:
        at, name = holders[placement.tensor, placement.box], placement.tensor
        digest = int(_digest_box(placement, storages, dtype, keys))
        if at[0] == rank:
            first[name] = (first.get(name, 0) + digest) % 2**64
        # The first holder counts for all, each of the others against it: once together, if they agree.
        weight = len(at) if at[0] == rank else -1
        agreed[name] = (agreed.get(name, 0) + weight * digest) % 2**64
    return first, agreed


def replica_counts(parts: Sequence[RankPlacements]) -> dict[str, int]:
    """How often the ranks together hold each logical tensor.

    Raises: ValueError unless they hold every element of a tensor equally often.
    """
    shared = {id(part.placements): part for part in parts}  # replicas share the data
    ranks = Counter(id(part.placements) for part in parts)
    boxes: Counter[tuple[str, Box]] = Counter()
    for key, part in shared.items():
        for placement in part.placements:
            boxes[placement.tensor, placement.box] += ranks[key]
    times: dict[str, set[int]] = {}
    distinct: Counter[str] = Counter()
    for (name, box), number in boxes.items():
        times.setdefault(name, set()).add(number)
        distinct[name] += box.numel
    shapes = {name: shape for part in shared.values() for name, shape in part.tensors.items()}
    for name, numbers in times.items():
        if len(numbers) != 1 or distinct[name] != Box.whole(shapes[name]).numel:
            raise ValueError(
                f"ranks hold {distinct[name]} elements of {name} {shapes[name]}, parts of it {sorted(numbers)} times; "
                "expected every element equally often: pass the placements of every rank of whole engines"
            )
    return {name: numbers.pop() for name, numbers in times.items()}


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


def _keyed_sum(values: torch.Tensor, keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over a box in wrapping int64, one dimension after the other."""
    total = values.view(BITS[values.element_size()]).to(torch.int64, copy=True)
    if values.element_size() == 8:  # a square does not know the sign: that of 64 bits is folded into the others
        total.bitwise_xor_((total >> 32) & 0xFFFFFFFF)
    total.add_(_GOLDEN)
    # Not linear in the bits: else replicas that are wrong in opposite directions would add up to the right sum.
    total.mul_(total)
    for key in reversed(keys):
        total = total.mul_(key).sum(-1)
    return total


def _finalise(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in place; shifts are made logical by a mask."""
    for shift, factor in _MIX:
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
