"""Engines by name, as `rollout.engine` gives it.

A new engine is a name in `config/rollout.py`, a description here, and a function in `factory.py` that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarlhf.config import RolloutConfig
from megarlhf.rollout.engine_spec import EngineSpec
from megarlhf.rollout.vllm.spec import VllmSpec

ENGINES: Mapping[str, EngineSpec] = {"vllm": VllmSpec(), "megatron": EngineSpec()}


def engine_of(rollout: RolloutConfig) -> EngineSpec:
    """Description of the configured engine."""
    return ENGINES[rollout.engine]
