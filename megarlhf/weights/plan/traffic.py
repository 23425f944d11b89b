"""Costs of a plan, and their lower bounds: elements by rank and by node, seconds for stated links."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import VLLM_VOCAB_MULTIPLE, count_elements, padded_vocab_size, table_of
from megarlhf.architectures.table import Entry, dimensions
from megarlhf.layout import MeshLayout
from megarlhf.placement import Box, Placement, RankPlacements
from megarlhf.weights.plan.copy_plan import CopyPlan
from megarlhf.weights.plan.overlaps import NodeOf, split_box


def least_receive(sources: Sequence[RankPlacements], destinations: Sequence[RankPlacements]) -> dict[int, int]:
    """Elements that each rank must receive whatever the plan: all it wants, less what it holds.

    Counted from the placements of the rank alone: other ranks and the plan play no part.
    """
    held = {part.rank: part.placements for part in sources}
    lacking: dict[tuple[Box, tuple[Box, ...]], int] = {}
    counts: dict[tuple[int, int], int] = {}
    least = {}
    for part in destinations:
        own = held.get(part.rank, ())
        pair = id(part.placements), id(own)  # replicas share theirs, and `sources` and `destinations` keep them alive
        if pair not in counts:
            counts[pair] = _lacked(part.placements, own, lacking)
        least[part.rank] = counts[pair]
    return least


def _lacked(
    wanted: Sequence[Placement], own: Sequence[Placement], lacking: dict[tuple[Box, tuple[Box, ...]], int]
) -> int:
    """Elements of `wanted` that are not in `own`. `lacking` remembers a box among others, for all layers alike."""
    own_boxes: dict[str, list[Box]] = defaultdict(list)
    for placement in own:
        own_boxes[placement.tensor].append(placement.box)
    count = 0
    for placement in wanted:
        key = (placement.box, tuple(own_boxes.get(placement.tensor, ())))
        if key not in lacking:
            lacking[key] = sum(box.numel for box in split_box(*key)[1])
        count += lacking[key]
    return count


Interval = tuple[int, int]
"""Indices [start, stop) of the one dim along which a tensor is cut."""


@dataclass(frozen=True)
class Formula:
    """Elements that each rank receives, in the order of ranks, from the sizes alone."""

    least: list[int]
    """Elements that the rank's engine share has and its trainer share lacks."""
    all_gather: list[int]
    """W less what it holds: where peers gather, every rank makes every Hugging Face tensor."""


def formula(arch: Architecture, mesh: MeshLayout, trainer: MegatronLayout, engine_tp: int) -> Formula:
    """`least_receive` made a second way, to the element: from the shapes in the model's table and intervals of indices.

    Placements, boxes and plans have no part in it, so that each is a check of the other.

    Maths: least(r) = sum over entries of w (n |V| - h |V & T|). An entry is w elements at each index of the dim that
    is cut; V and T are the indices in r's engine share and trainer share; the model has n such entries (one a layer,
    or one an expert and layer), r's stage and experts h of them. all_gather(r): with the whole for V.

    On average that is the textbook's W (1 / engine_tp - o / pp), o being the average of |V & T| / size, and what the
    textbook leaves out: either side's padding of the vocabulary, KV heads that several engine ranks have, tensors
    that are whole on every rank, both copies of a tied embedding, experts (h / ep), stages of unequal size.
    """
    return Formula(_lacking(arch, mesh, trainer, engine_tp), _lacking(arch, mesh, trainer, 1))


def _lacking(arch: Architecture, mesh: MeshLayout, trainer: MegatronLayout, engine_tp: int) -> list[int]:
    vocab = padded_vocab_size(arch.vocab_size, 1, VLLM_VOCAB_MULTIPLE)
    places = [(mesh.coordinates(rank), rank % engine_tp) for rank in range(mesh.world_size)]
    lacking = [0] * mesh.world_size
    for entry, in_model, in_stage in _entries(arch, trainer):
        num, num_resident = (arch.num_experts, arch.num_experts // trainer.ep) if entry.per_expert else (1, 1)
        cut, size, width = _cut(entry, dimensions(arch))
        for rank, (at, v) in enumerate(places):
            trainer_rows = _share(cut, size, trainer.tp, at.tp, trainer.padded_vocab)
            engine_rows = [_share(cut, size, engine_tp, v, vocab)]
            if cut == "qkv":
                engine_rows = _query_key_value(arch, engine_tp, v)
            need = num * in_model * _common(engine_rows, (0, size))
            lacking[rank] += width * (need - num_resident * in_stage[at.pp] * _common(engine_rows, trainer_rows))
    return lacking


def _entries(arch: Architecture, trainer: MegatronLayout) -> list[tuple[Entry, int, list[int]]]:
    """Every entry, how many of it the model has, and how many each pipeline stage holds."""
    table = table_of(arch)
    layers = [sum(map(len, chunks)) for chunks in trainer.chunk_layers(arch.num_layers)]
    first = [1] + [0] * (trainer.pp - 1)
    last = first[::-1]
    word, *positions = table.embedding
    ends = [(entry, 1, first) for entry in positions] + [(entry, 1, last) for entry in table.final]
    if arch.tied_embeddings:
        ends.append((word, 1, list(map(max, first, last))))
    else:
        ends += [(word, 1, first), (table.lm_head, 1, last)]
    return [x for x in ends + [(entry, arch.num_layers, layers) for entry in table.layer] if x[0].when(arch)]


def _cut(entry: Entry, dims: Mapping[str, int]) -> tuple[str, int, int]:
    """The dim along which an entry is cut, its size, and the elements at each index of it in all its tensors."""
    words = {word for _, shape in entry.tensors for word in shape}
    numel = sum(math.prod(dims[word] for word in shape) for _, shape in entry.tensors)
    known = ("vocab", "qkv", "q", "ffn", "expert_ffn")
    # Of gate and up in one tensor each half is cut, as where they are two.
    also = {"kv": "qkv", "gate_up": "ffn"}
    cut = next((also[w] for w in also if w in words), None) or next((w for w in known if w in words), "one")
    return cut, dims[cut], numel // dims[cut]


def _share(cut: str, size: int, tp: int, index: int, padded_vocab: int) -> Interval:
    """An equal share; of a vocabulary, with the padding that stands behind it; of a tensor on every rank, all."""
    if cut == "one":
        return 0, 1
    rows = padded_vocab if cut == "vocab" else size
    return min(size, rows * index // tp), min(size, rows * (index + 1) // tp)


def _query_key_value(arch: Architecture, tp: int, index: int) -> list[Interval]:
    """An engine's query heads and their KV heads in the trainer's rows, which are [q; k; v] of one group after another.

    With more ranks than KV heads, tp / num_kv_heads ranks have the same one.
    """
    groups, width = arch.num_kv_heads, arch.head_dim
    queries = arch.num_heads // groups * width
    starts = [group * (queries + 2 * width) for group in range(groups)]
    first, stop = (groups * queries * share // tp for share in (index, index + 1))
    parts = [(max(0, first - group * queries), min(queries, stop - group * queries)) for group in range(groups)]
    query_rows = [(start + a, start + b) for start, (a, b) in zip(starts, parts, strict=True) if a < b]
    kv_heads = starts[groups * index // tp : -(-groups * (index + 1) // tp)]
    return query_rows + [(start + queries, start + queries + 2 * width) for start in kv_heads]


def _common(intervals: Sequence[Interval], other: Interval) -> int:
    return sum(max(0, min(stop, other[1]) - max(start, other[0])) for start, stop in intervals)


def model_elements(arch: Architecture) -> int:
    """Elements of the model; those of a tied head are the embedding's."""
    return sum(count_elements(arch))


@dataclass(frozen=True, kw_only=True)
class Links:
    """Speeds in gigabits per second and direction."""

    rank_gbps: float
    """Between a rank and the others of its node; what crosses between nodes does not use this link."""
    node_gbps: float
    """Between a node and the others, all its ranks together, whichever of them send and receive."""


def wire_seconds(plan: CopyPlan, node_of: NodeOf, links: Links, element_bytes: int) -> float:
    """The time of the busiest link, each moving all its bytes without a pause: an estimate from below.

    What stays inside a node is charged to the links of its two ranks, what crosses to the links of its two nodes, and
    neither to the other: a rank's link inside the node (NVLink) is not the way out of it (network cards). All links
    work at the same time. Local copies, gathers and scatters are not in it, nor a rank's own part of its node's link.
    """
    through: dict[tuple[str, str, int], int] = defaultdict(int)
    for (src, dst), numel in plan.traffic.items():
        if src == dst:
            continue
        crosses = node_of[src] != node_of[dst]
        kind, ends = ("node", (node_of[src], node_of[dst])) if crosses else ("rank", (src, dst))
        through[kind, "out", ends[0]] += numel
        through[kind, "in", ends[1]] += numel
    speed = {"rank": links.rank_gbps, "node": links.node_gbps}
    return max((8e-9 * element_bytes * numel / speed[kind] for (kind, _, _), numel in through.items()), default=0.0)


def received_by_node(traffic: Mapping[tuple[int, int], int], nodes: int) -> list[int]:
    """Elements that come into each node, of elements by (source node, destination node)."""
    return [sum(numel for (_, dst), numel in traffic.items() if dst == node) for node in range(nodes)]
