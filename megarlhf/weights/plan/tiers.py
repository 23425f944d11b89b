"""A plan in two tiers: what a node lacks comes into it once, then it is fanned out inside the node.

Status: made and counted by `megarlhf plan`, and executed in memory by tests. Runs execute the one-tier plan of
`copy_plan.py`; they will use this one when there is more than one node to measure it on.

Several ranks of a node often want the same box: engines of fewer ranks than a node has, replicated norms and
routers, KV heads that tensor-parallel ranks share. Between nodes the link is the narrowest, so that such a box
crosses once, to one of them, who hands it on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarlhf.placement import Box, Placement, RankPlacements
from megarlhf.weights.plan.copy_plan import CopyPlan, make_plan
from megarlhf.weights.plan.load_balance import SenderShare, balance_senders
from megarlhf.weights.plan.overlaps import NodeOf, Ranks, by_tensor, split_box

Owner = tuple[int, int]
"""(rank, position among the tensor's wanted placements in the node)."""


@dataclass(frozen=True)
class TieredPlan:
    """Two plans, executed one after the other by the same carrier."""

    arrive: CopyPlan
    """Reads the source storages, writes the destination storages: what a rank or its node holds, and each box that
    a node lacks once."""
    fan_out: CopyPlan
    """Reads the destination storages, writes the destination storages, inside nodes: what came in for others too."""


def traffic_between_nodes(plan: CopyPlan, node_of: NodeOf) -> dict[tuple[int, int], int]:
    """Elements by (source node, destination node), of different nodes."""
    elements: Counter[tuple[int, int]] = Counter()
    for (src, dst), numel in plan.traffic.items():
        if node_of[src] != node_of[dst]:
            elements[node_of[src], node_of[dst]] += numel
    return dict(elements)


def make_tiers(
    sources: Sequence[RankPlacements],
    destinations: Sequence[RankPlacements],
    node_of: NodeOf,
    *,
    only_rank: int | None = None,
) -> TieredPlan:
    """The plan in two tiers for ranks on the nodes `node_of` (rank -> node).

    What comes into a node is the least possible: all that its ranks want together, less what they hold together.
    Of several ranks that want the same, each receives an equal, contiguous part and hands it to the others.

    Raises: ValueError as `make_plan`.
    """
    split = _Split()
    for node in sorted({node_of[part.rank] for part in destinations}):
        wanting = sorted((part for part in destinations if node_of[part.rank] == node), key=lambda part: part.rank)
        _split_node(node, [part for part in sources if node_of[part.rank] == node], wanting, split)
    first = [_only(part, split.first[part.rank]) for part in destinations]
    arrived = [_only(part, split.arrived[part.rank]) for part in destinations if split.arrived[part.rank]]
    fanned_out = [_only(part, split.fanned_out[part.rank]) for part in destinations if split.fanned_out[part.rank]]
    return TieredPlan(
        make_plan(sources, first, only_rank=only_rank, node_of=node_of),
        make_plan(arrived, fanned_out, only_rank=only_rank, node_of=node_of),
    )


class _Split:
    """Placements of each rank: filled in the first tier, those of them that are handed on, filled in the second."""

    def __init__(self) -> None:
        self.first: dict[int, list[Placement]] = defaultdict(list)
        self.arrived: dict[int, list[Placement]] = defaultdict(list)
        self.fanned_out: dict[int, list[Placement]] = defaultdict(list)


@dataclass(frozen=True, slots=True)
class _Region:
    """A box that is wanted by the same owners, and either held in the node or not, everywhere."""

    box: Box
    owners: tuple[Owner, ...]
    ranks: Ranks
    comes_in: bool
    numel: int
    row: int

    @property
    def is_shared(self) -> bool:
        """Whether the region enters the node once for several owners."""
        return self.comes_in and len(self.owners) > 1


def _only(part: RankPlacements, placements: list[Placement]) -> RankPlacements:
    return replace(part, placements=tuple(placements))


def _split_node(node: int, holding: Sequence[RankPlacements], wanting: Sequence[RankPlacements], split: _Split) -> None:
    tensors = list(_node_regions(holding, wanting))
    needs: Counter[Ranks] = Counter()
    for _, regions in tensors:
        for region in regions:
            if region.is_shared:
                needs[region.ranks] += region.numel

    def snap(ranks: Ranks, _node: int, position: int) -> int:
        at = 0
        for _, regions in tensors:
            for region in regions:
                if region.is_shared and region.ranks == ranks:
                    if at + region.numel >= position:
                        return at + (position - at + region.row // 2) // region.row * region.row
                    at += region.numel
        raise AssertionError(f"position {position} is behind the end {at} of what ranks {ranks} share")

    shares = balance_senders({ranks: {node: numel} for ranks, numel in needs.items()}, snap)
    passed: Counter[Ranks] = Counter()
    for placements, regions in tensors:
        for region in regions:
            if region.is_shared:
                start = passed[region.ranks]
                passed[region.ranks] += region.numel
                _hand_on(placements, region, start, shares[region.ranks, node], split)
            else:
                for rank, index in region.owners:
                    split.first[rank].append(placements[index].part(region.box))


def _hand_on(
    placements: Sequence[Placement], region: _Region, start: int, shares: Sequence[SenderShare], split: _Split
) -> None:
    """Each share's rank gets its rows of the region in the first tier, the other owners in the second."""
    begin = 0
    for receiver, stop in shares:
        end = min(stop - start, region.numel)
        if begin >= end:
            continue
        box = region.box
        if end - begin < region.numel:
            box = box.rows(begin // region.row, end // region.row)
        begin = end
        chosen = next(owner for owner in region.owners if owner[0] == receiver)
        for owner in region.owners:
            rank, index = owner
            part = placements[index].part(box)
            if owner == chosen:
                split.first[rank].append(part)
                split.arrived[rank].append(part)
            else:
                split.fanned_out[rank].append(part)


def _node_regions(
    holding: Sequence[RankPlacements], wanting: Sequence[RankPlacements]
) -> Iterator[tuple[list[Placement], tuple[_Region, ...]]]:
    """The wanted placements of each tensor and their regions; tensors that are cut alike share the regions."""
    in_node = by_tensor(holding)
    patterns: dict[object, tuple[_Region, ...]] = {}
    for name, (ranks, placements) in by_tensor(wanting).items():
        boxes = tuple([p.box for p in placements])
        node_boxes = tuple([p.box for p in in_node[name][1]]) if name in in_node else ()
        key = (tuple(ranks), boxes, node_boxes)
        if key not in patterns:
            patterns[key] = tuple(_regions(ranks, boxes, node_boxes))
        yield placements, patterns[key]


def _regions(ranks: Sequence[int], boxes: Sequence[Box], node_boxes: Sequence[Box]) -> Iterator[_Region]:
    owners_of: dict[Box, list[Owner]] = {}
    for index, (rank, box) in enumerate(zip(ranks, boxes, strict=True)):
        owner = (rank, index)
        _, new_boxes = split_box(box, sorted(owners_of))
        refined: dict[Box, list[Owner]] = {}
        for earlier, owners in owners_of.items():
            common = earlier.intersect(box)
            if common is None:
                refined[earlier] = owners
                continue
            refined[common] = [*owners, owner]
            refined.update(dict.fromkeys(earlier.minus(common), owners))
        refined.update({new: [owner] for new in new_boxes})
        owners_of = refined
    for box, owners in owners_of.items():
        inside, outside = split_box(box, sorted(set(node_boxes)))
        for part, comes_in in (*((part, False) for part, _ in inside), *((part, True) for part in outside)):
            numel = part.numel
            row = numel // part.shape[0] if len(part.shape) > 1 else numel
            yield _Region(part, tuple(owners), tuple(sorted({rank for rank, _ in owners})), comes_in, numel, row)


def least_received_by_node(
    sources: Sequence[RankPlacements],
    destinations: Sequence[RankPlacements],
    node_of: NodeOf,
) -> dict[int, int]:
    """The least that each node must receive, in elements: its ranks' wants together less what they hold together."""
    needs = {}
    for node in sorted({node_of[part.rank] for part in destinations}):
        holding = [part for part in sources if node_of[part.rank] == node]
        wanting = [part for part in destinations if node_of[part.rank] == node]
        lacking = (region for _, regions in _node_regions(holding, wanting) for region in regions if region.comes_in)
        needs[node] = sum(region.numel for region in lacking)
    return needs
