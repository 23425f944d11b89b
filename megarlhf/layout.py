"""Rank arithmetic of a model's layout: the coordinates of each rank on the axes tp, cp, dp and pp.

Only integers, no torch: the same code serves a live run and a plan of 512 ranks on a laptop.

Positions of the mesh count in Megatron's default order, `tp-cp-ep-dp-pp`: tp varies fastest, pp slowest. Expert
parallelism is carved out of dp x cp, as in Megatron-Core, and adds no axis of its own: `expert_layout` is the experts'
view of the same ranks. A layout's `order` says which rank is at each position; `engine_order` chooses an order for
which fewer weights travel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")
"""Axes from the fastest to the slowest."""


@dataclass(frozen=True)
class Coordinates:
    """Coordinate of a rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class MeshLayout:
    """Sizes of the axes. Their product is the number of ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Number of ranks over which the experts of a layer are distributed, neighbours on the axes cp and dp; divides
    dp x cp."""
    order: tuple[int, ...] | None = None
    """Ranks, counted from `first`, at the first len(order) positions of the mesh. Further blocks of that length are
    permuted alike. None: position n has rank `first` + n."""
    first: int = 0
    """First global rank of the layout; its ranks are contiguous."""

    def __post_init__(self) -> None:
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide dp x cp = {self.dp} x {self.cp} = {self.dp * self.cp}, out of which "
                "expert parallelism is carved; choose a divisor of it"
            )
        if self.order is None:
            return
        if sorted(self.order) != list(range(len(self.order))) or not self.order or self.world_size % len(self.order):
            raise ValueError(
                f"order = {self.order} must have each of 0..{len(self.order) - 1} once, and its length must divide the "
                f"{self.world_size} ranks of the layout; use engine_order, or None"
            )

    def __str__(self) -> str:
        """`tp 2 x pp 4 x dp 8, ep 4`, for example; cp and ep are left out where they are 1."""
        sizes = [f"{axis} {self.size(axis)}" for axis in ("tp", "cp", "pp", "dp") if axis != "cp" or self.cp > 1]
        return " x ".join(sizes) + (f", ep {self.ep}" if self.ep > 1 else "")

    @property
    def ranks(self) -> range:
        """Global ranks of the layout."""
        return range(self.first, self.first + self.world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def size(self, axis: str) -> int:
        """Length of one axis."""
        return int(getattr(self, axis))

    @property
    def expert_layout(self) -> MeshLayout:
        """The experts' view of the same ranks: ep takes the place of cp, and dp are the ranks with equal experts.

        Groups over its tp, cp and pp are the smallest sets of ranks that hold the whole model.
        """
        dp = self.dp * self.cp // self.ep
        return MeshLayout(tp=self.tp, cp=self.ep, dp=dp, pp=self.pp, order=self.order, first=self.first)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank. Raises: ValueError for one outside `ranks`."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is outside [{self.first}, {self.ranks.stop}) of layout {self}")
        position = rank - self.first
        if self.order is not None:
            block, inside = divmod(position, len(self.order))
            position = block * len(self.order) + self.order.index(inside)
        coordinates = {}
        for axis in AXES:
            position, coordinates[axis] = divmod(position, self.size(axis))
        return Coordinates(**coordinates)

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank at these coordinates."""
        position = tp + self.tp * (cp + self.cp * (dp + self.dp * pp))
        if self.order is None:
            return self.first + position
        block, inside = divmod(position, len(self.order))
        return self.first + block * len(self.order) + self.order[inside]

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Sets of ranks that differ on `axes` only, each in the order of positions (ascending without an `order`).

        `groups(["tp"])` are the tensor-parallel groups, `groups(["tp", "pp"])` the whole model replicas.
        """
        assert set(axes) <= set(AXES), f"axes {axes} are not all among {AXES}"
        others = [axis for axis in AXES if axis not in axes]
        groups = []
        for fixed in itertools.product(*(range(self.size(axis)) for axis in reversed(others))):
            shared = dict(zip(reversed(others), fixed, strict=True))
            varying = [axis for axis in reversed(AXES) if axis in axes]
            inner = itertools.product(*(range(self.size(axis)) for axis in varying))
            groups.append(tuple(self.rank_at(**shared, **dict(zip(varying, point, strict=True))) for point in inner))
        return sorted(groups)


def engine_order(layout: MeshLayout, engine_tp: int, ranks_per_node: int) -> tuple[int, ...] | None:
    """The `order` of `layout` for which rollout engines of `engine_tp` ranks have more of their weights in place.

    vLLM forms its engines from contiguous global ranks, [e x engine_tp, (e + 1) x engine_tp), and rank v of an engine
    holds the v-th share of every sharded tensor. A trainer's rank with tp coordinate t holds the t-th of its own
    shares, of its stage's layers. The intersection of both shares need not travel. Each stage needs all the others'
    layers anyway, so only t and v matter. Permuting the trainer's mesh chooses which t meets which v:

    - tp = engine_tp: the identity; share t is share v.
    - tp = k x engine_tp: inside each tensor-parallel group, engine j takes the t with t mod k = j, so that
      t // k = v: every trainer's share is inside the engine's. Contiguous ranks would leave most of them disjoint.
    - engine_tp = k x tp: k tensor-parallel groups interleaved, t = v // k: the engine's share is inside the trainer's.
    - other sizes: ranks are matched with positions greedily, the largest overlap of shares first, which is not
      always the best matching.

    Ranks move only inside blocks of whole tensor-parallel groups in one node: a tensor-parallel group communicates in
    every layer and must not be spread over nodes for one copy per step. If the best block does not fit into a node,
    the largest that does is taken. A group that is wider than a node is permuted in itself.

    Quality: compared with the best permutation inside nodes (by brute force), the overlap of shares is equal where all
    sizes are powers of two. For other sizes up to 8 it is at least 92.9% of the best (tp 3, engine_tp 4 on nodes of 6;
    4 -> 3: 96.4%, 8 -> 6: 98.1%). Overlap counts all stages alike, although the one with the vocabulary or with more
    layers is heavier: where a node holds several stages, another permutation may serve the heavier one better.
    Bytes received (4 layers, up to 24 ranks): the fewest in all cases of powers of two; with other sizes up to 4.5%
    more at pp > 1, 8.6% with uneven stages, and 25% at pp = 1, where a rank receives little (3 -> 4, nodes of 6).

    Returns None if the identity has as large an overlap.

    Raises: ValueError when the ranks do not divide into engines.
    """
    world = layout.world_size
    if world % engine_tp:
        raise ValueError(
            f"{world} ranks do not divide into engines of {engine_tp} ranks; choose a rollout.parallel.tp that "
            "divides the number of ranks"
        )
    block = _block(layout.tp, engine_tp, world, ranks_per_node)
    period = math.lcm(block, engine_tp)
    order = list(itertools.chain(*(_matched(layout.tp, engine_tp, start, block) for start in range(0, period, block))))
    if _in_place(layout.tp, engine_tp, order) <= _in_place(layout.tp, engine_tp, range(period)):
        return None
    return tuple(order)


def _block(tp: int, engine_tp: int, world: int, ranks_per_node: int) -> int:
    """Number of ranks that may be permuted among themselves: whole tensor-parallel groups, inside a node."""
    room = min(ranks_per_node, world)
    sizes = [size for size in range(tp, room + 1, tp) if room % size == 0 and world % size == 0]
    if not sizes:
        return tp
    full = math.lcm(tp, engine_tp)
    return full if full in sizes else max(sizes)


def _matched(tp: int, engine_tp: int, start: int, block: int) -> list[int]:
    """The rank of each position of the block, chosen greedily by the largest overlaps."""
    pairs = itertools.product(range(start, start + block), range(block))
    ranks: dict[int, int] = {}
    for rank, position in sorted(pairs, key=lambda pair: (-_overlap(tp, engine_tp, pair[1], pair[0]), *pair)):
        if position not in ranks and rank not in ranks.values():
            ranks[position] = rank
    return [ranks[position] for position in range(block)]


def _overlap(tp: int, engine_tp: int, position: int, rank: int) -> int:
    """Parts that are in both the trainer's and the engine's share, of tp x engine_tp equal parts of a tensor."""
    t, v = position % tp, rank % engine_tp
    return max(0, min((t + 1) * engine_tp, (v + 1) * tp) - max(t * engine_tp, v * tp))


def _in_place(tp: int, engine_tp: int, order: Sequence[int]) -> int:
    return sum(_overlap(tp, engine_tp, position, rank) for position, rank in enumerate(order))


def split_chunks(
    num_layers: int, pp: int, vpp: int = 1, layers_per_stage: Sequence[int] | None = None
) -> list[list[range]]:
    """Global layer indices of the model chunks of each pipeline rank: [pp][vpp].

    The model is cut into pp x vpp virtual stages. Rank p holds stages p, p + pp, p + 2 pp, ... (Megatron-Core's
    interleaving), so that a micro-batch passes every rank vpp times. `layers_per_stage` are the sizes of the pp x vpp
    stages in the model's order; by default they are equal.

    Raises: ValueError for virtual stages without a pipeline, or stages that do not add up to the layers.
    """
    if vpp > 1 and pp == 1:
        raise ValueError(f"vpp = {vpp} needs pp > 1, got pp = 1; set vpp to 1 or choose a larger pp")
    num_stages = pp * vpp
    product = f"pp = {pp}" if vpp == 1 else f"pp x vpp = {pp} x {vpp} = {num_stages}"
    if layers_per_stage is None:
        if num_layers % num_stages:
            divisor = "a pp" if vpp == 1 else "a product"
            raise ValueError(
                f"{num_layers} layers do not divide by {product}; choose {divisor} that divides the layers, "
                f"or give parallel.layers_per_stage, {num_stages} numbers that add up to {num_layers}"
            )
        layers_per_stage = [num_layers // num_stages] * num_stages
    sizes = list(layers_per_stage)
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ValueError(
            f"layers_per_stage = {sizes} must be {num_stages} positive numbers ({product}) "
            f"that add up to the model's {num_layers} layers; they add up to {sum(sizes)}"
        )
    ends = itertools.accumulate(sizes)
    stages = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [stages[rank::pp] for rank in range(pp)]


def column_multiple(tp: int, cp: int) -> int:
    """Divisor of the columns of a micro-batch's grid: sequence parallelism cuts a rank's columns into tp equal parts,
    context parallelism all columns into 2 x cp."""
    return tp if cp == 1 else cp * math.lcm(2, tp)


def split_evenly(count: int, parts: int) -> list[range]:
    """Cut `range(count)` into `parts` contiguous pieces whose lengths differ by at most one."""
    base, remainder = divmod(count, parts)
    ends = list(itertools.accumulate(base + (part < remainder) for part in range(parts)))
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
