"""What a run of rl is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarlhf.models.role import Role
from megarlhf.observe.phases import Phases
from megarlhf.rollout.engine import RolloutEngine, Sampling
from megarlhf.trainers.bad_steps import BadSteps
from megarlhf.trainers.rl_score import Rewarder


@dataclass(frozen=True)
class Components:
    """The roles, the engine and what belongs to them."""

    actor: Role
    reference: Role
    critic: Role | None
    engine: RolloutEngine
    rewarder: Rewarder
    sampling: Sampling
    phases: Phases
    bad_steps: Mapping[str, BadSteps]
    """By trained role."""

    @property
    def trained(self) -> list[Role]:
        return [role for role in (self.actor, self.critic) if role is not None]
