"""Configuration of `megarlhf.Loop`: the sections of `rl` that a user's own loop leaves to us."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from megarlhf.config.data import PromptDataConfig, SourceConfig
from megarlhf.config.rewards import RewardConfig
from megarlhf.config.rl import RLConfig
from megarlhf.config.run import CheckpointConfig

_WHY = "a Loop is given prompts and advantages by your own code"
_UNREAD = ("critic", "reward_model", "rewards", "ptx", "ema", "reference_update", "eval", "samples", "environment")
"""Sections of `rl` that a loop does not read."""
_UNREAD_OF_ALGO = (
    "gamma",
    "lam",
    "critic_lam",
    "dynamic_sampling",
    "overlong",
    "missing_end_penalty",
    "unrewarded",
    "shuffle_rewards",
    "group_of_one",
)
"""Keys of `algo` about rewards and advantages, which the user's loop computes."""
_NO_CRITIC = "reinforce"
"""An advantage that needs no critic and whitens nothing. It is not computed."""


class LoopDataConfig(PromptDataConfig):
    """Limits of prompts, which the loop is given as texts or tokens."""

    train: tuple[SourceConfig, ...] = ()
    """Always empty: the loop reads no data."""


class LoopCheckpointConfig(CheckpointConfig):
    every: Annotated[int, Field(ge=0)] = 1
    """Steps between resume points. With 1, a loop that was killed goes on from the last whole step."""


class LoopConfig(RLConfig):
    """Configuration of a user's own loop: the sections of `rl`, without rewards and data."""

    command: ClassVar[str] = "rl"

    rewards: tuple[RewardConfig, ...] = ()
    data: LoopDataConfig = LoopDataConfig()
    checkpoint: LoopCheckpointConfig = LoopCheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _without_critic(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(algo := data.get("algo") or {}, dict):
            return data
        if (name := algo.get("advantage", _NO_CRITIC)) != _NO_CRITIC:
            raise ValueError(f"algo.advantage = {name!r}: {_WHY}; leave it out")
        return {**data, "algo": {**algo, "advantage": _NO_CRITIC}}

    def require_rewards(self) -> None:
        """Raises: ValueError for what a loop does not read. It needs no rewards."""
        unread = self.changed(*_UNREAD) + [f"algo.{key}" for key in self.algo.changed(*_UNREAD_OF_ALGO)]
        default = LoopDataConfig(max_prompt_tokens=self.data.max_prompt_tokens)
        unread += [
            f"data.{key}" for key in type(default).model_fields if getattr(default, key) != getattr(self.data, key)
        ]
        unread += [f"train.{key}" for key in self.train.changed("critic_warmup_steps", "stop", "sampler", "num_epochs")]
        unread += [f"checkpoint.{key}" for key in self.checkpoint.changed("best", "every_updates")]
        unread += self.rollout.changed_of_slices()
        if unread:
            raise ValueError(f"{', '.join(unread)} would have no effect: {_WHY}; leave that out")
        if self.algo.kl_in_reward:
            raise ValueError(
                f"algo.kl.coef = {self.algo.kl.coef:g} with placement: reward: a Loop adds no KL to the advantages "
                "that it is given; set algo.kl.placement: loss with estimator: k3, or coef: 0"
            )
