"""Description of an engine: answers that planning, rehearsals and trainers need before an engine is built."""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.architectures.architecture import Architecture
from megarlhf.config import RoleConfig, RolloutConfig


class EngineSpec:
    """An engine that samples with the actor itself. Engines with weights of their own override this."""

    has_own_weights = False
    """Whether the engine has weights and memory of its own: then it takes turns with the roles on the device, and the
    actor's weights are sent to it and verified."""

    def check(
        self, rollout: RolloutConfig, actor: RoleConfig, arch: Architecture, world_size: int, *, on_cpu: bool
    ) -> None:
        """Check that engines fit the ranks, the model and the device. Raises: ValueError."""

    def check_adapter(self, rollout: RolloutConfig, arch: Architecture) -> None:
        """Check that the engine can apply the actor's adapter itself (`rollout.lora: adapter`). Raises: ValueError."""
        raise ValueError(f"rollout.lora = adapter is for the engine vllm, and rollout.engine = {rollout.engine}")

    def host_weights_key(self, rollout: RolloutConfig) -> str:
        """Key that moves the engine's weights to host memory while the roles work; empty if they do not move."""
        return ""

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
        own_weights = "reshard_bucket_mib poison_weights balance max_engine_rebuilds verify_weights_every vllm"
        return dict.fromkeys(own_weights.split(), "the engine megatron samples with the actor itself")
