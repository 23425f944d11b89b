"""Configuration of `megarlhf serve-reward`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.rewards import RewardConfig
from megarlhf.config.roles import FrozenModel


class ServeRewardConfig(FrozenModel):
    """Server of rewards for runs whose `rewards` have `kind: http`."""

    rewards: tuple[RewardConfig, ...]
    """Rules and classifiers. A response gets their weighted sum, or null if none applies."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach, such as `0.0.0.0`, requires a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 5000
    """Port to listen on; 0: a free one, which the start prints."""
    token_env: str | None = None
    """Environment variable with the token that requests must send as `Authorization: Bearer`."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device of classifiers."""
    max_samples: PositiveInt = 1024
    """Most responses in one request."""
    max_body_mib: PositiveInt = 32
    """Largest size of one request."""

    @model_validator(mode="after")
    def _check(self) -> ServeRewardConfig:
        if not self.rewards:
            raise ValueError("rewards is empty; name at least one, such as [{kind: classifier, path: models/judge}]")
        if other := [reward.kind for reward in self.rewards if reward.kind not in ("rule", "classifier")]:
            raise ValueError(f"serve-reward serves rules and classifiers; got a reward of kind {other[0]!r}")
        chats = [r.label for r in self.rewards if r.kind == "classifier" and (r.form == "chat" or r.append_eos)]
        if chats:
            raise ValueError(
                f"reward {chats[0]!r}: a request has rendered prompts, without messages and without what was cut, "
                "which form: chat and append_eos need; set form: joined or pair, or give the run the classifier"
            )
        if scaled := [reward.label for reward in self.rewards if reward.normalise != "none"]:
            raise ValueError(f"reward {scaled[0]!r}: normalise is for the run that asks; set it there")
        if self.host not in ("127.0.0.1", "localhost", "::1") and self.token_env is None:
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines: set token_env to the name of an environment "
                "variable with a token, or host to 127.0.0.1"
            )
        return self
