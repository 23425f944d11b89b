"""Process groups of a role: Megatron-Core's `ProcessGroupCollection` for one layout, of all ranks or of some.

Roles with equal layouts, their `order` included, share groups, since a group of the same ranks is made once. Every
rank must build the same meshes in the same order (making a group is a collective call of its members), those of roles
that it has nothing of included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from megarlhf.layout import AXES, Coordinates, MeshLayout
from megarlhf.parallel.process_groups import made_by_members
from megarlhf.runtime import Runtime

Each = TypeVar("Each")


@dataclass
class GroupCache:
    """Process groups of this rank by their ranks in order, so that no two are made of the same. A rank's place in its
    group is that in the tuple: its coordinate in the layout, whatever the layout's `order`.

    A group is made by its members alone: of 512 ranks each makes the few that it is in, and not hundreds that it is
    not. All groups of one rank, which say nothing to anybody, are one."""

    runtime: Runtime
    _made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def my_group(self, all_groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """The group of `all_groups`, of which no two have a rank in common, that this rank is in, if any. Collective
        among its members, who ask for their common groups in the same order."""
        ranks = next((ranks for ranks in all_groups if self.runtime.rank in ranks), None)
        if ranks is None:
            return None
        if ranks not in self._made:
            # Only an `order` has groups that are not ascending, and not every way of making groups takes those; torch
            # before 2.13 does not know the argument.
            as_given: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
            with made_by_members():
                self._made[ranks] = dist.new_group(
                    list(ranks),
                    # Else torch's own default, which is 10 minutes with NCCL, whatever the default group has.
                    timeout=timedelta(seconds=self.runtime.timeout_seconds),
                    backend=self.runtime.backend,
                    use_local_synchronization=True,
                    **as_given,
                )
        return self._made[ranks]


@dataclass(frozen=True)
class Mesh:
    """One role's layout with its process groups, as this rank sees them."""

    layout: MeshLayout
    at: Coordinates | None
    """Where this rank stands in the layout; None: it is not in it, and has nothing of the role."""
    groups: ProcessGroupCollection
    """None, each, where this rank is not in it."""
    runtime: Runtime

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank, which has its part of the role, stands in the layout."""
        assert self.at is not None, (
            f"rank {self.runtime.rank} is not in the layout {self.layout} of {self.layout.ranks}"
        )
        return self.at

    @property
    def is_member(self) -> bool:
        """Whether this rank has a part of the role."""
        return self.at is not None

    @property
    def is_first_stage(self) -> bool:
        return self.at is not None and self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at is not None and self.at.pp == self.layout.pp - 1

    @property
    def owns_outputs(self) -> bool:
        """Of the ranks that compute a data-parallel shard's outputs, this is the one that hands them out."""
        return self.at is not None and self.runtime.rank == self.owner_of_outputs(self.at.dp)

    def own(self, by_dp: Sequence[list[Each]]) -> list[Each]:
        """Of a list for each data-parallel rank, this one's; nothing where this rank has nothing of the role."""
        return [] if self.at is None else by_dp[self.at.dp]

    def owner_of_outputs(self, dp: int) -> int:
        """Global rank that hands out the outputs of a data-parallel rank."""
        return self.layout.rank_at(tp=0, cp=0, dp=dp, pp=self.layout.pp - 1)

    def last_stage(self, dp: int) -> list[int]:
        """Global ranks of a data-parallel rank's last stage, which compute its losses."""
        layout = self.layout
        return [
            layout.rank_at(tp=tp, cp=cp, dp=dp, pp=layout.pp - 1) for cp in range(layout.cp) for tp in range(layout.tp)
        ]

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        at = self.coordinates
        return self.layout.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=self.layout.pp - 1)

    @property
    def experts(self) -> Coordinates:
        """Where this rank stands in the layout's `expert_layout`."""
        return self.layout.expert_layout.coordinates(self.runtime.rank)

    @property
    def replica(self) -> int:
        """Number of the copy of the model that this rank's part belongs to."""
        return self.experts.dp

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Global ranks that together hold one copy of the model, this rank's; they are the group `tp_ep_pp`."""
        replicas = self.layout.expert_layout.groups(("tp", "cp", "pp"))
        return next(ranks for ranks in replicas if self.runtime.rank in ranks)


def build_mesh(layout: MeshLayout, runtime: Runtime, cache: GroupCache) -> Mesh:
    """Make (or reuse) the groups of `layout` that this rank is in.

    Raises: ValueError when the run has not all of the layout's ranks.
    """
    if layout.ranks.stop > runtime.world_size:
        raise ValueError(f"layout {layout} needs ranks up to {layout.ranks[-1]}, the run has {runtime.world_size}")
    _initialize_megatron_globals()
    groups = ProcessGroupCollection()
    for name, axes in GROUPS_AXES.items():
        setattr(groups, name, cache.my_group(layout.groups(axes)))
    for name, axes in EXPERT_GROUPS_AXES.items():
        setattr(groups, name, cache.my_group(layout.expert_layout.groups(axes)))
    # First and last stage, which share tied embeddings and sum their gradients.
    lines = layout.groups(["pp"])
    groups.embd = cache.my_group((line[0], line[-1]) if len(line) > 1 else line for line in lines)
    groups.pos_embd = cache.my_group((line[0],) for line in lines)
    groups.intra_dist_opt = cache.my_group(layout.groups(AXES))
    at = layout.coordinates(runtime.rank) if runtime.rank in layout.ranks else None
    return Mesh(layout=layout, at=at, groups=groups, runtime=runtime)


GROUPS_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "intra_dp_cp": ("dp", "cp"),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
"""Megatron-Core's group names and the axes they run over."""

EXPERT_GROUPS_AXES: dict[str, tuple[str, ...]] = {
    "ep": ("cp",),
    "expt_tp": ("tp",),
    "tp_ep": ("tp", "cp"),
    "tp_ep_pp": ("tp", "cp", "pp"),
    "expt_dp": ("dp",),
    "intra_expt_dp": ("dp",),
}
"""The same for experts, on the axes of `MeshLayout.expert_layout`."""


def _initialize_megatron_globals() -> None:
    """The two module globals of Megatron-Core that no argument replaces.

    The scratch buffer serves sequence-parallel gathers. The RNG tracker does nothing: weights come from
    `weights/`, and dropout is 0 everywhere, so no layer draws a random number.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    initialize_rng_tracker(inference_rng_tracker=True)


def forget_scratch_buffer() -> None:
    """Let go of the buffer of sequence-parallel gathers, which outlives a run. Another run in this process makes its
    own, which may be on another device."""
    parallel_state.destroy_global_memory_buffer()
