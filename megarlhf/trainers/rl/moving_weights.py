"""Weights that follow the actor's: their moving average, and a reference that is moved."""

from __future__ import annotations

import torch

from megarlhf.models.build import placements_on
from megarlhf.models.role import Role
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.reshard import Resharder


class MovingAverage:
    """The average of the actor's weights over its updates, as a role of the actor's layout in fp32."""

    def __init__(self, role: Role, actor: Role, decay: float) -> None:
        self.role, self._actor, self._decay = role, actor, decay
        role.parts.parameters.may_change()

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the actor: decay x average + (1 - decay) x actor."""
        self.role.parts.device_memory.keep_only(self.role.parts.parameters, self._actor.parts.parameters)
        actor = self._actor.shard.parameters()
        for name, average in self.role.shard.parameters().items():
            average.lerp_(actor[name].to(average), 1 - self._decay)


class MovingReference:
    """Moves the reference towards the actor, whatever the layouts of the two are."""

    def __init__(self, reference: Role, actor: Role, every: int, mixup: float) -> None:
        self.role, self._actor, self._every, self._mixup = reference, actor, every, mixup
        self._resharder: Resharder | None = None
        reference.parts.parameters.may_change()

    def after(self, step: int) -> bool:
        """Move it where step `step` (from 1) is one of those; whether it was. Collective."""
        if step % self._every:
            return False
        self.role.parts.device_memory.keep_only(self.role.parts.parameters, self._actor.parts.parameters)
        reference = self.role.shard.parameters()
        with torch.no_grad():
            arrived = {name: torch.empty_like(tensor) for name, tensor in reference.items()}
            self._transfer().run(self._actor.shard.parameters(), arrived)
            for name, tensor in reference.items():
                tensor.lerp_(arrived[name], self._mixup)
        return True

    def _transfer(self) -> Resharder:
        if self._resharder is None:
            runtime, shard = self.role.mesh.runtime, self.role.shard
            world = range(runtime.world_size)
            plan = make_plan(
                [placements_on(self._actor.shard, rank) for rank in world],
                [placements_on(shard, rank) for rank in world],
                only_rank=runtime.rank,
            )
            # What arrives lies in other memory each time.
            self._resharder = Resharder(
                plan, rank=runtime.rank, dtype=shard.dtype, device=runtime.device, keep_views=False
            )
        return self._resharder
