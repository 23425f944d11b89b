"""Rank arithmetic of a model's layout: which rank stands where on the tp, cp, dp and pp axes.

Pure integers, no torch: the same code answers for a live run and for a plan of 512 ranks on a laptop.
The order is Megatron's default, `tp-cp-ep-dp-pp`: tp varies fastest, pp slowest. Expert parallelism is
carved out of dp (and cp), as in Megatron-Core, and adds no axis of its own here.
"""

from __future__ import annotations

import itertools
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
class Layout:
    """The sizes of the axes; their product is the number of ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def size(self, axis: str) -> int:
        """Length of one axis."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`, which must lie in [0, world_size)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size}) of layout {self}")
        found = {}
        for axis in AXES:
            rank, found[axis] = divmod(rank, self.size(axis))
        return Coordinates(**found)

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Every set of ranks that differ on `axes` only, each in ascending order.

        `groups(["tp"])` are the tensor-parallel groups, `groups(["tp", "pp"])` the whole model replicas.
        """
        assert set(axes) <= set(AXES), f"axes {axes} are not all among {AXES}"
        others = [axis for axis in AXES if axis not in axes]
        found = []
        for fixed in itertools.product(*(range(self.size(axis)) for axis in reversed(others))):
            at = dict(zip(reversed(others), fixed, strict=True))
            inner = itertools.product(*(range(self.size(axis)) for axis in reversed(AXES) if axis in axes))
            varying = [axis for axis in reversed(AXES) if axis in axes]
            ranks = (self.rank_at(**at, **dict(zip(varying, point, strict=True))) for point in inner)
            found.append(tuple(sorted(ranks)))
        return sorted(found)


def split_layers(num_layers: int, pp: int, layers_per_stage: Sequence[int] | None = None) -> list[range]:
    """Global layer indices of each pipeline stage.

    Without `layers_per_stage` the stages are equal and `pp` must divide `num_layers`.
    """
    if layers_per_stage is None:
        if num_layers % pp:
            raise ValueError(
                f"{num_layers} layers do not divide by pp = {pp}; choose a pp that divides the layers, "
                f"or give parallel.layers_per_stage, {pp} numbers that add up to {num_layers}"
            )
        layers_per_stage = [num_layers // pp] * pp
    if len(layers_per_stage) != pp or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage = {list(layers_per_stage)} must be {pp} positive numbers (pp = {pp}) "
            f"that add up to the model's {num_layers} layers; they add up to {sum(layers_per_stage)}"
        )
    ends = list(itertools.accumulate(layers_per_stage))
    return [range(end - size, end) for end, size in zip(ends, layers_per_stage, strict=True)]


def split_evenly(count: int, parts: int) -> list[range]:
    """`range(count)` cut into `parts` contiguous pieces whose lengths differ by at most one."""
    base, rest = divmod(count, parts)
    ends = list(itertools.accumulate(base + (part < rest) for part in range(parts)))
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
