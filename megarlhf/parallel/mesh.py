"""Process groups of a role: Megatron-Core's `ProcessGroupCollection` for one layout, over all ranks or some of them.

Roles with equal layouts and equal `order` share groups, since a group of the same ranks is made once. Making a group is
a collective call of its members. So every rank must build the same meshes in the same order, also those of roles that
it has no part of.
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

Item = TypeVar("Item")


@dataclass
class GroupCache:
    """This rank's process groups, by their ranks in order, so that no group is made twice.

    The index of a rank in the tuple is its rank in the group: its coordinate in the layout, whatever the layout's
    `order`. A group is made by its members alone: each of 512 ranks makes the few groups that it is in, not the
    hundreds that it is not in. All groups of a single rank, which send no messages, are the same group."""

    runtime: Runtime
    _made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def my_group(self, all_groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """The one of the disjoint `all_groups` that this rank is in, or None. Collective among the group's members,
        which must ask for their common groups in the same order."""
        ranks = next((ranks for ranks in all_groups if self.runtime.rank in ranks), None)
        if ranks is None:
            return None
        if ranks not in self._made:
            # Only an `order` makes groups that do not ascend. torch before 2.13 does not have the argument.
            options: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
            with made_by_members():
                self._made[ranks] = dist.new_group(
                    list(ranks),
                    # Without it, torch takes its own default (10 minutes with NCCL), not the default group's timeout.
                    timeout=timedelta(seconds=self.runtime.timeout_seconds),
                    backend=self.runtime.backend,
                    use_local_synchronization=True,
                    **options,
                )
        return self._made[ranks]


@dataclass(frozen=True)
class Mesh:
    """One role's layout with its process groups, as this rank sees them."""

    layout: MeshLayout
    position: Coordinates | None
    """Coordinates of this rank in the layout. None: the rank is outside the layout and has no part of the role."""
    groups: ProcessGroupCollection
    """Megatron-Core's groups. They are None on a rank outside the layout."""
    runtime: Runtime

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank, which must be in the layout."""
        assert self.position is not None, (
            f"rank {self.runtime.rank} is not in the layout {self.layout} of {self.layout.ranks}"
        )
        return self.position

    @property
    def is_member(self) -> bool:
        """True if this rank has a part of the role."""
        return self.position is not None

    @property
    def is_first_stage(self) -> bool:
        return self.position is not None and self.position.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.position is not None and self.position.pp == self.layout.pp - 1

    @property
    def owns_outputs(self) -> bool:
        """True on the one rank that provides its data-parallel shard's outputs, which several ranks compute."""
        return self.position is not None and self.runtime.rank == self.owner_of_outputs(self.position.dp)

    def own(self, by_dp: Sequence[list[Item]]) -> list[Item]:
        """Select this rank's list from one list per data-parallel rank; empty on a rank outside the layout."""
        return [] if self.position is None else by_dp[self.position.dp]

    def owner_of_outputs(self, dp: int) -> int:
        """Global rank that provides the outputs of a data-parallel rank."""
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
        own = self.coordinates
        return self.layout.rank_at(tp=own.tp, cp=own.cp, dp=own.dp, pp=self.layout.pp - 1)

    @property
    def experts(self) -> Coordinates:
        """Coordinates of this rank in the layout's `expert_layout`."""
        return self.layout.expert_layout.coordinates(self.runtime.rank)

    @property
    def replica(self) -> int:
        """Number of the model replica that this rank's part belongs to."""
        return self.experts.dp

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's model replica, which together hold the model once: the group `tp_ep_pp`."""
        replicas = self.layout.expert_layout.groups(("tp", "cp", "pp"))
        return next(ranks for ranks in replicas if self.runtime.rank in ranks)


def build_mesh(layout: MeshLayout, runtime: Runtime, cache: GroupCache) -> Mesh:
    """Make (or reuse) the groups of `layout` that this rank is in.

    Raises: ValueError when the run lacks some of the layout's ranks.
    """
    if layout.ranks.stop > runtime.world_size:
        raise ValueError(f"layout {layout} needs ranks up to {layout.ranks[-1]}, the run has {runtime.world_size}")
    _initialize_megatron_globals()
    groups = ProcessGroupCollection()
    for name, axes in GROUPS_AXES.items():
        setattr(groups, name, cache.my_group(layout.groups(axes)))
    for name, axes in EXPERT_GROUPS_AXES.items():
        setattr(groups, name, cache.my_group(layout.expert_layout.groups(axes)))
    # First and last stage share tied embeddings and sum their gradients.
    pipelines = layout.groups(["pp"])
    groups.embd = cache.my_group((ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in pipelines)
    groups.pos_embd = cache.my_group((ranks[0],) for ranks in pipelines)
    groups.intra_dist_opt = cache.my_group(layout.groups(AXES))
    position = layout.coordinates(runtime.rank) if runtime.rank in layout.ranks else None
    return Mesh(layout=layout, position=position, groups=groups, runtime=runtime)


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
"""Megatron-Core's names of expert groups, and their axes in `MeshLayout.expert_layout`."""


def _initialize_megatron_globals() -> None:
    """Set the two module globals of Megatron-Core that no argument replaces.

    The scratch buffer serves sequence-parallel gathers. The RNG tracker is unused: weights come from `weights/`, and
    dropout is 0 everywhere, so no layer draws a random number.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    initialize_rng_tracker(inference_rng_tracker=True)


def forget_scratch_buffer() -> None:
    """Free the buffer of sequence-parallel gathers, which would outlive the run. The next run in this process makes its
    own, perhaps on another device."""
    parallel_state.destroy_global_memory_buffer()
