"""What a plan costs, and what it could cost at least: elements by rank and by node, seconds for stated links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarlhf.layout import Layout
from megarlhf.weights.architecture import Architecture
from megarlhf.weights.placement import Box, RankPlacements
from megarlhf.weights.plan import CopyPlan
from megarlhf.weights.plan.cuts import NodeOf, cut_box
from megarlhf.weights.tensor_map import logical_tensors, table_of
from megarlhf.weights.tensor_map.table import walk


def least_receive(sources: Sequence[RankPlacements], destinations: Sequence[RankPlacements]) -> dict[int, int]:
    """Elements that each rank must receive whatever the plan: all it wants, less what it holds.

    Counted from the placements of the rank alone: other ranks and the plan play no part.
    """
    held: dict[int, dict[str, list[Box]]] = {}
    for part in sources:
        boxes: dict[str, list[Box]] = defaultdict(list)
        for placement in part.placements:
            boxes[placement.tensor].append(placement.box)
        held[part.rank] = boxes
    known: dict[tuple[Box, tuple[Box, ...]], int] = {}
    least = {}
    for part in destinations:
        count = 0
        own = held.get(part.rank, {})
        for placement in part.placements:
            key = (placement.box, tuple(own.get(placement.tensor, ())))
            if key not in known:
                known[key] = sum(rest.numel for rest in cut_box(*key)[1])
            count += known[key]
        least[part.rank] = count
    return least


@dataclass(frozen=True)
class Formula:
    """Elements a rank, by the sizes alone: no padding, no replicas, every tensor cut evenly."""

    least: float
    """W / engine_tp less what is in place."""
    all_gather: float
    """W less what is held: what a rank receives where every rank makes every Hugging Face tensor."""


def formula(arch: Architecture, mesh: Layout, engine_tp: int, ep: int = 1) -> Formula:
    """The average over ranks.

    Maths: o is the average share of a sharded tensor that a rank's trainer and engine shares have in common (1 /
    engine_tp where tp and engine_tp are equal, 1 / tp where engines are strided); least = W (1 / engine_tp - o / pp),
    all-gather = W (1 - 1 / (tp pp)); the experts' part of W has pp x ep in place of pp.
    """
    total, experts = model_elements(arch)
    shared = _common_share(mesh, engine_tp)
    least = gathered = 0.0
    for numel, parts in ((total - experts, mesh.pp), (experts, mesh.pp * ep)):
        least += numel * (1 / engine_tp - shared / parts)
        gathered += numel * (1 - 1 / (mesh.tp * parts))
    return Formula(least, gathered)


def model_elements(arch: Architecture) -> tuple[int, int]:
    """Elements of the model, and those of them that belong to single experts."""
    total = sum(Box.whole(shape).numel for shape in logical_tensors(arch).values())
    experts = sum(
        Box.whole(tensor.shape).numel for tensor, entry in walk(table_of(arch), arch, "lm") if entry.per_expert
    )
    return total, experts


def _common_share(mesh: Layout, engine_tp: int) -> float:
    common = 0.0
    for rank in range(mesh.world_size):
        t, v = mesh.coordinates(rank).tp, rank % engine_tp
        common += max(0.0, min((t + 1) / mesh.tp, (v + 1) / engine_tp) - max(t / mesh.tp, v / engine_tp))
    return common / mesh.world_size


@dataclass(frozen=True, kw_only=True)
class Links:
    """Speeds in gigabits per second and direction."""

    rank_gbps: float
    """Between a rank and the others of its node."""
    node_gbps: float
    """Between a node and the others, all its ranks together."""


def wire_seconds(plan: CopyPlan, node_of: NodeOf, links: Links, element_bytes: int) -> float:
    """The time of the busiest link, each moving all its bytes without a pause: an estimate from below.

    Local copies, gathers and scatters are not in it.
    """
    through: dict[tuple[str, str, int], int] = defaultdict(int)
    for (src, dst), numel in plan.traffic.items():
        if src == dst:
            continue
        through["rank", "out", src] += numel
        through["rank", "in", dst] += numel
        if node_of[src] != node_of[dst]:
            through["node", "out", node_of[src]] += numel
            through["node", "in", node_of[dst]] += numel
    speed = {"rank": links.rank_gbps, "node": links.node_gbps}
    return max((8e-9 * element_bytes * numel / speed[kind] for (kind, _, _), numel in through.items()), default=0.0)


def entering(crossing: Mapping[tuple[int, int], int], nodes: int) -> list[int]:
    """Elements that come into each node, of elements by (source node, destination node)."""
    return [sum(numel for (_, dst), numel in crossing.items() if dst == node) for node in range(nodes)]
