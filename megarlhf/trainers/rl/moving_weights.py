"""Weights that follow the actor's: a moving average, and a reference that is moved from time to time."""

from __future__ import annotations

from functools import cached_property

import torch

from megarlhf.models.build import placements_on
from megarlhf.models.role import Role
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.reshard import Resharder


class MovingAverage:
    """Moving average of the actor's weights over its updates, in fp32 and in the actor's layout."""

    def __init__(self, role: Role, actor: Role, decay: float) -> None:
        self.role, self._actor, self._decay = role, actor, decay
        role.parts.parameters.may_change()

    @torch.no_grad()
    def update(self) -> None:
        """Set the average to decay x average + (1 - decay) x actor, after an update of the actor."""
        self.role.parts.device_memory.keep_only(self.role.parts.parameters, self._actor.parts.parameters)
        actor = self._actor.shard.parameters()
        for name, average in self.role.shard.parameters().items():
            average.lerp_(actor[name].to(average), 1 - self._decay)


class MovingReference:
    """Moves the reference towards the actor, whatever the layouts of the two are."""

    def __init__(self, reference: Role, actor: Role, every: int, mixup: float) -> None:
        self.role, self._actor, self._every, self._mixup = reference, actor, every, mixup
        reference.parts.parameters.may_change()

    def after(self, number: int) -> bool:
        """Move the reference if step `number` is a multiple of `every`; returns whether it was. Collective."""
        if number % self._every:
            return False
        self.role.parts.device_memory.keep_only(self.role.parts.parameters, self._actor.parts.parameters)
        reference = self.role.shard.parameters()
        with torch.no_grad():
            received = {name: torch.empty_like(tensor) for name, tensor in reference.items()}
            self._transfer.run(self._actor.shard.parameters(), received)
            for name, tensor in reference.items():
                tensor.lerp_(received[name], self._mixup)
        return True

    @cached_property
    def _transfer(self) -> Resharder:
        runtime, shard = self.role.mesh.runtime, self.role.shard
        world = range(runtime.world_size)
        plan = make_plan(
            [placements_on(self._actor.shard, rank) for rank in world],
            [placements_on(shard, rank) for rank in world],
            only_rank=runtime.rank,
        )
        # The receiving tensors are new each time.
        return Resharder(plan, rank=runtime.rank, dtype=shard.dtype, device=runtime.device, keep_views=False)
