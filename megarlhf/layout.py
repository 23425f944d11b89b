"""Rank arithmetic of a model's layout: which rank stands where on the tp, cp, dp and pp axes.

Pure integers, no torch: the same code answers for a live run and for a plan of 512 ranks on a laptop.
A position of the mesh counts in Megatron's default order, `tp-cp-ep-dp-pp`: tp varies fastest, pp slowest. Expert
parallelism is carved out of dp x cp, as in Megatron-Core, and adds no axis of its own: `expert_layout` is how the
experts see the same ranks. Which rank stands at a position is the layout's `order`; `engine_order` chooses one under
which weights travel less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")
"""From the fastest to the slowest."""


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class MeshLayout:
    """The sizes of the axes; their product is the number of ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks between which the experts of a layer are shared out, neighbours on the axes cp and dp: a divisor of
    dp x cp."""
    order: tuple[int, ...] | None = None
    """Ranks, counted from `first`, at the first len(order) positions of the mesh; every further block of as many is
    permuted alike. None: each position's rank is `first` and its number."""
    first: int = 0
    """Global rank that the layout's ranks begin with; they follow each other."""

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
                f"order = {self.order} must hold each of 0..{len(self.order) - 1} once, and its length divide the "
                f"{self.world_size} ranks of the layout; use engine_order, or None"
            )

    def __str__(self) -> str:
        """`tp 2 x pp 4 x dp 8, ep 4`: axes of one are named only where everybody looks for them."""
        sizes = [f"{axis} {self.size(axis)}" for axis in ("tp", "cp", "pp", "dp") if axis != "cp" or self.cp > 1]
        return " x ".join(sizes) + (f", ep {self.ep}" if self.ep > 1 else "")

    @property
    def ranks(self) -> range:
        """Global ranks of the layout."""
        return range(self.first, self.first + self.world_size)

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def size(self, axis: str) -> int:
        """Length of one axis."""
        return int(getattr(self, axis))

    @property
    def expert_layout(self) -> MeshLayout:
        """The same ranks as the experts see them: in place of cp stands ep, and dp are the ranks with equal experts.

        Its groups over tp, cp and pp are the smallest sets of ranks that hold the whole model.
        """
        dp = self.dp * self.cp // self.ep
        return MeshLayout(tp=self.tp, cp=self.ep, dp=dp, pp=self.pp, order=self.order, first=self.first)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`, which must be one of `ranks`."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is outside [{self.first}, {self.ranks.stop}) of layout {self}")
        position = rank - self.first
        if self.order is not None:
            block, inside = divmod(position, len(self.order))
            position = block * len(self.order) + self.order.index(inside)
        at = {}
        for axis in AXES:
            position, at[axis] = divmod(position, self.size(axis))
        return Coordinates(**at)

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank at these coordinates."""
        position = tp + self.tp * (cp + self.cp * (dp + self.dp * pp))
        if self.order is None:
            return self.first + position
        block, inside = divmod(position, len(self.order))
        return self.first + block * len(self.order) + self.order[inside]

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Every set of ranks that differ on `axes` only, each in the order of its positions: a rank's place in its
        group is its coordinate (ascending without an `order`).

        `groups(["tp"])` are the tensor-parallel groups, `groups(["tp", "pp"])` the whole model replicas.
        """
        assert set(axes) <= set(AXES), f"axes {axes} are not all among {AXES}"
        others = [axis for axis in AXES if axis not in axes]
        groups = []
        for fixed in itertools.product(*(range(self.size(axis)) for axis in reversed(others))):
            at = dict(zip(reversed(others), fixed, strict=True))
            inner = itertools.product(*(range(self.size(axis)) for axis in reversed(AXES) if axis in axes))
            varying = [axis for axis in reversed(AXES) if axis in axes]
            groups.append(tuple(self.rank_at(**at, **dict(zip(varying, point, strict=True))) for point in inner))
        return sorted(groups)


def engine_order(layout: MeshLayout, engine_tp: int, ranks_per_node: int) -> tuple[int, ...] | None:
    """The `order` of `layout` under which rollout engines of `engine_tp` ranks find more of their weights in place.

    vLLM forms its engines from contiguous global ranks, [e x engine_tp, (e + 1) x engine_tp), and rank v of an engine
    holds the v-th share of every sharded tensor. A trainer's rank with tp coordinate t holds the t-th of its own
    shares, of its stage's layers. Whatever lies in both shares need not travel; since each stage is in need of all
    the others' layers anyway, only t and v matter, and permuting the trainer's mesh chooses which t meets which v:

    - tp = engine_tp: the identity; share t is share v.
    - tp = k x engine_tp: inside each tensor-parallel group, engine j takes the t with t mod k = j, so that
      t // k = v: every trainer's share lies inside the engine's. Contiguous ranks would leave most of them disjoint.
    - engine_tp = k x tp: k tensor-parallel groups interleaved, t = v // k: the engine's share lies inside the
      trainer's.
    - other sizes: ranks are matched with positions greedily, the largest overlap of shares first, which is not
      always the best matching.

    Ranks move only inside blocks of whole tensor-parallel groups that lie in one node, since a tensor-parallel group
    talks in every layer and must not be spread over nodes for a copy once a step; where the best block does not fit,
    the largest that does is taken. A group that is itself wider than a node is permuted in itself.

    How good: against the best permutation inside nodes, by brute force, the overlap of shares is equal where all
    sizes are powers of two; for others up to 8 it is 92.9% of it at least (tp 3, engine_tp 4 on nodes of 6; 4 -> 3:
    96.4%, 8 -> 6: 98.1%). Overlap counts every stage alike, which not all are (the one with the vocabulary, uneven
    layers): where a node holds several and cannot serve every rank, another permutation may serve the heavier stage.
    Bytes received (4 layers, up to 24 ranks): the fewest in all cases of powers of two; with other sizes up to 4.5%
    more at pp > 1, 8.6% with uneven stages, and 25% at pp = 1, where a rank receives little (3 -> 4, nodes of 6).

    Returns None where the identity has as large an overlap: never fewer elements of equal stages are in place than
    with it.

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
    """Ranks that may be permuted among themselves: whole tensor-parallel groups, inside a node."""
    room = min(ranks_per_node, world)
    sizes = [size for size in range(tp, room + 1, tp) if room % size == 0 and world % size == 0]
    if not sizes:
        return tp
    full = math.lcm(tp, engine_tp)
    return full if full in sizes else max(sizes)


def _matched(tp: int, engine_tp: int, start: int, block: int) -> list[int]:
    """The rank of each position of the block, the largest overlaps first."""
    pairs = sorted(
        (
            (-_overlap(tp, engine_tp, position, rank), rank, position)
            for position in range(block)
            for rank in range(start, start + block)
        ),
    )
    ranks: dict[int, int] = {}
    taken: set[int] = set()
    for _, rank, position in pairs:
        if position not in ranks and rank not in taken:
            ranks[position] = rank
            taken.add(rank)
    return [ranks[position] for position in range(block)]


def _overlap(tp: int, engine_tp: int, position: int, rank: int) -> int:
    """Of tp x engine_tp equal parts of a sharded tensor, those in both the trainer's and the engine's share."""
    t, v = position % tp, rank % engine_tp
    return max(0, min((t + 1) * engine_tp, (v + 1) * tp) - max(t * engine_tp, v * tp))


def _in_place(tp: int, engine_tp: int, order: Sequence[int]) -> int:
    return sum(_overlap(tp, engine_tp, position, rank) for position, rank in enumerate(order))


def split_chunks(
    num_layers: int, pp: int, vpp: int = 1, layers_per_stage: Sequence[int] | None = None
) -> list[list[range]]:
    """Global layer indices of the model chunks of each pipeline rank: [pp][vpp].

    The model is cut into pp x vpp virtual stages, and rank p holds stages p, p + pp, p + 2 pp, ... (Megatron-Core's
    interleaving), so that a micro-batch passes every rank vpp times. `layers_per_stage` are the sizes of the pp x vpp
    stages in the model's order; without it they are equal.

    Raises: ValueError for virtual stages without a pipeline, or stages that do not add up to the layers.
    """
    if vpp > 1 and pp == 1:
        raise ValueError(f"vpp = {vpp} needs pp > 1, got pp = 1; set vpp to 1 or choose a larger pp")
    num_stages = pp * vpp
    words = f"pp = {pp}" if vpp == 1 else f"pp x vpp = {pp} x {vpp} = {num_stages}"
    if layers_per_stage is None:
        if num_layers % num_stages:
            divisor = "a pp" if vpp == 1 else "a product"
            raise ValueError(
                f"{num_layers} layers do not divide by {words}; choose {divisor} that divides the layers, "
                f"or give parallel.layers_per_stage, {num_stages} numbers that add up to {num_layers}"
            )
        layers_per_stage = [num_layers // num_stages] * num_stages
    sizes = list(layers_per_stage)
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ValueError(
            f"layers_per_stage = {sizes} must be {num_stages} positive numbers ({words}) "
            f"that add up to the model's {num_layers} layers; they add up to {sum(sizes)}"
        )
    ends = itertools.accumulate(sizes)
    stages = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [stages[rank::pp] for rank in range(pp)]


def column_multiple(tp: int, cp: int) -> int:
    """The columns of a micro-batch's grid are a multiple of this: sequence parallelism cuts a rank's into tp equal
    parts, context parallelism all of them into 2 x cp."""
    return tp if cp == 1 else cp * math.lcm(2, tp)


def split_evenly(count: int, parts: int) -> list[range]:
    """`range(count)` cut into `parts` contiguous pieces whose lengths differ by at most one."""
    base, remainder = divmod(count, parts)
    ends = list(itertools.accumulate(base + (part < remainder) for part in range(parts)))
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
