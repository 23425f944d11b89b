"""Description of an engine: answers that planning, rehearsals and trainers need before it is built, and its maker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarlhf.architectures.architecture import Architecture
from megarlhf.config import RoleConfig, RolloutConfig

if TYPE_CHECKING:  # models and engines take seconds to import, and planning needs neither
    import torch

    from megarlhf.models.role import Role
    from megarlhf.rollout.engine import RolloutEngine


class EngineSpec:
    """An engine. The answers here are of one that samples with the actor itself; others override them."""

    has_own_weights = False
    """Whether the engine has weights and memory of its own: then it takes turns with the roles on the device, and the
    actor's weights are sent to it and verified. It is rebuilt when it fails (`RestartingEngine`)."""
    sleep_key = ""
    """Key that decides what the engine frees while the roles work; empty if there is none."""

    def make(
        self, rollout: RolloutConfig, actor: Role, dtype: torch.dtype, max_prompt_tokens: int, micro_batch_samples: int
    ) -> RolloutEngine:
        """The engine, still without weights. Engines are imported here, since that takes seconds."""
        raise NotImplementedError

    def check(
        self, rollout: RolloutConfig, actor: RoleConfig, arch: Architecture, world_size: int, *, on_cpu: bool
    ) -> None:
        """Check that engines fit the ranks, the model and the device. Raises: ValueError."""

    def check_adapter(self, rollout: RolloutConfig, arch: Architecture) -> None:
        """Check that the engine can apply the actor's adapter itself (`rollout.lora: adapter`). Raises: ValueError."""
        raise ValueError(f"rollout.lora = adapter is for the engine vllm, and rollout.engine = {rollout.engine}")

    def host_weights(self, rollout: RolloutConfig) -> Mapping[str, str]:
        """Key that moves the engine's weights to host memory while the roles work, with the value that drops them
        instead; empty if they do not move."""
        return {}

    def deterministic_environment(self, engine_ranks: int) -> Mapping[str, tuple[str, ...]]:
        """Values of environment variables with which an engine of so many GPUs is deterministic. The first is the
        default."""
        return {}

    def check_deterministic(self, rollout: RolloutConfig) -> None:
        """Raises: ValueError for settings with which the engine is not deterministic."""

    def deterministic_device_problem(self, capability: tuple[int, int]) -> str:
        """Reason, with a remedy, why the engine is not deterministic on a GPU of this compute capability; or empty."""
        return ""

    def unread_keys(self, *, on_cpu: bool | None) -> Mapping[str, str]:
        """Keys below `rollout` that this engine does not read, each with the reason. on_cpu: None if unknown."""
        return {}
