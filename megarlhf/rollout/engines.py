"""Engines by name, as `rollout.engine` gives it.

A new engine is a name in `config/rollout.py`, and a description here that also makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarlhf.config import RolloutConfig
from megarlhf.rollout.engine_spec import EngineSpec
from megarlhf.rollout.vllm.spec import VllmSpec

if TYPE_CHECKING:
    import torch

    from megarlhf.models.role import Role
    from megarlhf.rollout.engine import RolloutEngine


class MegatronSpec(EngineSpec):
    """The actor itself."""

    def make(
        self, rollout: RolloutConfig, actor: Role, dtype: torch.dtype, max_prompt_tokens: int, micro_batch_samples: int
    ) -> RolloutEngine:
        from megarlhf.rollout.megatron_engine import MegatronEngine

        return MegatronEngine(actor.shard, micro_batch_samples, actor.parts)

    def unread_keys(self, *, on_cpu: bool | None) -> Mapping[str, str]:
        own_weights = "reshard_bucket_mib poison_weights balance max_engine_rebuilds verify_weights_every vllm"
        return dict.fromkeys(own_weights.split(), "the engine megatron samples with the actor itself")


ENGINES: Mapping[str, EngineSpec] = {"vllm": VllmSpec(), "megatron": MegatronSpec()}


def engine_of(rollout: RolloutConfig) -> EngineSpec:
    """Description of the configured engine."""
    return ENGINES[rollout.engine]
