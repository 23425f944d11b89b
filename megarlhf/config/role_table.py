"""Table of roles: one entry for each model that a run may build.

A new role, such as a teacher for distillation, is a section of a configuration and an entry here: planning, build,
scoring, resume and rehearsals read the table. What reads its column (a loss, an advantage) names that column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf.config.roles import RoleConfig
from megarlhf.config.shared_base import reference_section


@dataclass(frozen=True)
class RoleSpec:
    """How a role is built, and what it contributes.

    Example: the critic has a scalar head, `rl` trains it, builds it if the advantage needs values, and gets the column
    "values" from it.
    """

    head: Literal["lm", "scalar"]
    trained_by: tuple[str, ...] = ()
    """Commands that train it. They save its state in resume points and export its weights."""
    rl_section: Callable[[Any], RoleConfig | None] = lambda cfg: None
    """Section of an `RLConfig` that `rl` builds it from; None if the run does not need it."""
    column: str | None = None
    """Column of `Experience` that its forward fills: one value per sampled token."""
    is_actors_base: Callable[[Any], bool] = lambda cfg: False
    """Whether it is the actor with its adapter switched off, in a run that builds it. It takes no memory then."""
    may_retokenize: bool = False
    """Whether it may have its own tokenizer and read texts (`retokenize`) instead of the actor's token ids."""


def _reference(cfg: Any) -> RoleConfig | None:
    """Section of the reference, or the actor's if there is none."""
    if not cfg.needs_reference:
        return None
    moves = cfg.reference_update is not None
    return cfg.reference or cfg.actor if moves else reference_section(cfg.actor, cfg.reference)


ROLES: Mapping[str, RoleSpec] = {
    "actor": RoleSpec("lm", trained_by=("sft", "dpo", "rl"), rl_section=lambda cfg: cfg.actor, column="old_logprobs"),
    "reference": RoleSpec(
        "lm", rl_section=_reference, column="ref_logprobs", is_actors_base=lambda cfg: cfg.reference_is_base
    ),
    "critic": RoleSpec(
        "scalar",
        trained_by=("rl",),
        rl_section=lambda cfg: cfg.critic if cfg.algo.needs_critic else None,
        column="values",
    ),
    "reward_model": RoleSpec(
        "scalar",
        trained_by=("rm",),
        rl_section=lambda cfg: cfg.reward_model if cfg.uses_reward_model else None,
        may_retokenize=True,
    ),
    "against": RoleSpec("lm"),  # the other model of a comparison by `eval`
}
"""Roles in the order in which `rl` builds them."""


def roles_of_rl(cfg: Any) -> dict[str, RoleConfig]:
    """Sections of the roles that a run of `rl` builds."""
    sections = {name: spec.rl_section(cfg) for name, spec in ROLES.items()}
    return {name: section for name, section in sections.items() if section is not None}


def trained_roles(cfg: Any) -> list[str]:
    """Roles of a configuration that get an optimizer."""
    return [name for name in cfg.roles() if cfg.command in ROLES[name].trained_by]
