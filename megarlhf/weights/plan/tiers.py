"""A plan in two tiers: what a node lacks comes into it once, then it is fanned out inside the node.

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
from megarlhf.weights.plan.load_balance import Window, share_streams
from megarlhf.weights.plan.overlaps import NodeOf, Ranks, by_tensor, cut_box

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

    def crossing(self, node_of: NodeOf) -> dict[tuple[int, int], int]:
        """Elements by (source node, destination node), of different nodes."""
        return crossing(self.arrive, node_of)


def crossing(plan: CopyPlan, node_of: NodeOf) -> dict[tuple[int, int], int]:
    """Elements by (source node, destination node), of different nodes."""
    found: Counter[tuple[int, int]] = Counter()
    for (src, dst), numel in plan.traffic.items():
        if node_of[src] != node_of[dst]:
            found[node_of[src], node_of[dst]] += numel
    return dict(found)


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
    rest = [_only(part, split.rest[part.rank]) for part in destinations if split.rest[part.rank]]
    return TieredPlan(
        make_plan(sources, first, only_rank=only_rank, node_of=node_of),
        make_plan(arrived, rest, only_rank=only_rank, node_of=node_of),
    )


class _Split:
    """Placements of each rank: filled in the first tier, those of them that are handed on, filled in the second."""

    def __init__(self) -> None:
        self.first: dict[int, list[Placement]] = defaultdict(list)
        self.arrived: dict[int, list[Placement]] = defaultdict(list)
        self.rest: dict[int, list[Placement]] = defaultdict(list)


@dataclass(frozen=True, slots=True)
class _Atom:
    """A box that is wanted by the same owners, and either held in the node or not, everywhere."""

    box: Box
    owners: tuple[Owner, ...]
    ranks: Ranks
    comes_in: bool
    numel: int
    row: int

    @property
    def is_shared(self) -> bool:
        """It comes in for several, once."""
        return self.comes_in and len(self.owners) > 1


def _only(part: RankPlacements, placements: list[Placement]) -> RankPlacements:
    return replace(part, placements=tuple(placements))


def _split_node(node: int, holding: Sequence[RankPlacements], wanting: Sequence[RankPlacements], split: _Split) -> None:
    tensors = list(_node_atoms(holding, wanting))
    needs: Counter[Ranks] = Counter()
    for _, atoms in tensors:
        for atom in atoms:
            if atom.is_shared:
                needs[atom.ranks] += atom.numel

    def snap(ranks: Ranks, _node: int, position: int) -> int:
        at = 0
        for _, atoms in tensors:
            for atom in atoms:
                if atom.is_shared and atom.ranks == ranks:
                    if at + atom.numel >= position:
                        return at + (position - at + atom.row // 2) // atom.row * atom.row
                    at += atom.numel
        raise AssertionError(f"position {position} lies behind the end {at} of what ranks {ranks} share")

    windows = share_streams({ranks: {node: numel} for ranks, numel in needs.items()}, snap)
    passed: Counter[Ranks] = Counter()
    for placements, atoms in tensors:
        for atom in atoms:
            if atom.is_shared:
                start = passed[atom.ranks]
                passed[atom.ranks] += atom.numel
                _hand_on(placements, atom, start, windows[atom.ranks, node], split)
            else:
                for rank, index in atom.owners:
                    split.first[rank].append(_part(placements[index], atom.box))


def _hand_on(
    placements: Sequence[Placement], atom: _Atom, start: int, windows: Sequence[Window], split: _Split
) -> None:
    """Each window's rank gets its rows of the atom in the first tier, the other owners in the second."""
    begin = 0
    for receiver, stop in windows:
        end = min(stop - start, atom.numel)
        if begin >= end:
            continue
        first = atom.box.start[0] if atom.box.start else 0
        box = atom.box
        if end - begin < atom.numel:
            box = Box((first + begin // atom.row, *box.start[1:]), (first + end // atom.row, *box.stop[1:]))
        begin = end
        chosen = next(owner for owner in atom.owners if owner[0] == receiver)
        for owner in atom.owners:
            rank, index = owner
            part = _part(placements[index], box)
            if owner == chosen:
                split.first[rank].append(part)
                split.arrived[rank].append(part)
            else:
                split.rest[rank].append(part)


def _part(placement: Placement, box: Box) -> Placement:
    return placement if box == placement.box else placement.part(box)


def _node_atoms(
    holding: Sequence[RankPlacements], wanting: Sequence[RankPlacements]
) -> Iterator[tuple[list[Placement], tuple[_Atom, ...]]]:
    """The wanted placements of each tensor and their atoms; tensors that are cut alike share the atoms."""
    held = by_tensor(holding)
    known: dict[object, tuple[_Atom, ...]] = {}
    for name, (ranks, placements) in by_tensor(wanting).items():
        boxes = tuple([p.box for p in placements])
        in_node = tuple([p.box for p in held[name][1]]) if name in held else ()
        key = (tuple(ranks), boxes, in_node)
        if key not in known:
            known[key] = tuple(_atoms(ranks, boxes, in_node))
        yield placements, known[key]


def _atoms(ranks: Sequence[int], boxes: Sequence[Box], in_node: Sequence[Box]) -> Iterator[_Atom]:
    wanted: dict[Box, list[Owner]] = {}
    for index, (rank, box) in enumerate(zip(ranks, boxes, strict=True)):
        owner = (rank, index)
        _, fresh = cut_box(box, sorted(wanted))
        refined: dict[Box, list[Owner]] = {}
        for known, owners in wanted.items():
            common = known.intersect(box)
            if common is None:
                refined[known] = owners
                continue
            refined[common] = [*owners, owner]
            refined.update(dict.fromkeys(known.minus(common), owners))
        refined.update({new: [owner] for new in fresh})
        wanted = refined
    for box, owners in wanted.items():
        inside, outside = cut_box(box, sorted(set(in_node)))
        for part, comes_in in (*((hit, False) for hit, _ in inside), *((rest, True) for rest in outside)):
            numel = part.numel
            row = numel // part.shape[0] if len(part.shape) > 1 else numel
            yield _Atom(part, tuple(owners), tuple(sorted({rank for rank, _ in owners})), comes_in, numel, row)


def node_needs(
    sources: Sequence[RankPlacements],
    destinations: Sequence[RankPlacements],
    node_of: NodeOf,
) -> dict[int, int]:
    """The least that each node must receive, in elements: its ranks' wants together less what they hold together."""
    needs = {}
    for node in sorted({node_of[part.rank] for part in destinations}):
        holding = [part for part in sources if node_of[part.rank] == node]
        wanting = [part for part in destinations if node_of[part.rank] == node]
        needs[node] = sum(atom.numel for _, atoms in _node_atoms(holding, wanting) for atom in atoms if atom.comes_in)
    return needs
