"""Roles of a configuration of any command."""

from __future__ import annotations

from megarlhf.config.commands import RLConfig, RMConfig, SFTConfig
from megarlhf.config.evaluate import EvaluateConfig
from megarlhf.config.generate import GenerateConfig
from megarlhf.config.preference import DPOConfig
from megarlhf.config.roles import RoleConfig


def roles_of(
    cfg: SFTConfig | RMConfig | DPOConfig | RLConfig | GenerateConfig | EvaluateConfig,
) -> dict[str, RoleConfig]:
    """Roles that a run of the configuration builds, by name."""
    if isinstance(cfg, RLConfig | DPOConfig | EvaluateConfig):
        return cfg.roles()
    return {"reward_model": cfg.reward_model} if isinstance(cfg, RMConfig) else {"actor": cfg.actor}
