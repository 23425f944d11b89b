"""Configuration of `megarlhf serve-reward`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.rewards import RewardConfig
from megarlhf.config.roles import FrozenModel


class ServeRewardConfig(FrozenModel):
    """A server that gives rewards to runs whose `rewards` have `kind: http`."""

    rewards: tuple[RewardConfig, ...]
    """Rules and classifiers; a response gets their weighted sum, and null where none applies."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine (`0.0.0.0`, say) a token is required."""
    port: Annotated[int, Field(ge=0, le=65535)] = 5000
    """0: a free one, which the start prints."""
    token_env: str | None = None
    """The environment variable with the token that requests must bring as `Authorization: Bearer`."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where classifiers compute."""
    max_samples: PositiveInt = 1024
    """Responses of one request."""
    max_body_mib: PositiveInt = 32
    """Size of one request."""

    @model_validator(mode="after")
    def _check(self) -> ServeRewardConfig:
        if not self.rewards:
            raise ValueError("rewards is empty; name at least one, such as [{kind: classifier, path: models/judge}]")
        if other := [reward.kind for reward in self.rewards if reward.kind not in ("rule", "classifier")]:
            raise ValueError(f"serve-reward serves rules and classifiers; got a reward of kind {other[0]!r}")
        if untold := [r.label for r in self.rewards if r.kind == "classifier" and (r.form == "chat" or r.append_eos)]:
            raise ValueError(
                f"reward {untold[0]!r}: a request has rendered prompts and says nothing of messages, nor of what was "
                "cut, which form: chat and append_eos need; set form: joined or pair, or give the run the classifier"
            )
        if scaled := [reward.label for reward in self.rewards if reward.normalise != "none"]:
            raise ValueError(f"reward {scaled[0]!r}: normalise is of the run that asks; set it there")
        if self.host not in ("127.0.0.1", "localhost", "::1") and self.token_env is None:
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines: set token_env to the name of an environment "
                "variable with a token, or host to 127.0.0.1"
            )
        return self
