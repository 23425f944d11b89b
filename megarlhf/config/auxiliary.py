"""Configuration of additions to the policy's loss in `rl`: pretraining mix, average of the actor, moving reference."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.data import Sources, require_weights, without_old_splits
from megarlhf.config.roles import FrozenModel, Positive


class PTXConfig(FrozenModel):
    """Pretraining mix (PPO-ptx of InstructGPT): plain text that the actor still learns to predict while it is aligned.

    Each of the actor's updates adds coef x the mean next-token loss of a mini-batch of texts to the policy's loss.
    """

    data: Sources
    """Records with `text`, in any form that `data.train` may have."""
    coef: Positive = 27.8
    """Weight of the texts' loss, as in InstructGPT and DeepSpeed-Chat (unsup_coef), which makes a separate optimizer
    step of it."""
    mini_batch_samples: PositiveInt | None = None
    """Texts per update of the actor, over all ranks; default: train.mini_batch_samples."""
    max_tokens: PositiveInt | None = None
    """Longest text; a longer one is split into several. Default: data.max_prompt_tokens +
    rollout.max_response_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        return without_old_splits(data, ("data",)) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_weights("data", self.data)
        return self


class EMAConfig(FrozenModel):
    """An exponential moving average of the actor's weights, in fp32 and in the actor's layout. It is exported next to
    the actor as `actor_ema`, and is part of resume points."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.992
    """After each of the actor's updates: average = decay x average + (1 - decay) x actor. DeepSpeed-Chat uses 0.992."""


class ReferenceUpdateConfig(FrozenModel):
    """A reference that follows the actor (TRL's sync_ref_model). Every KL is measured against the moved reference,
    whose weights are part of resume points."""

    every: PositiveInt
    """Steps between two moves (TRL's ref_model_sync_steps)."""
    mixup: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the actor in a move: reference = (1 - mixup) x reference + mixup x actor (TRL's ref_model_mixup_alpha,
    0.6 there). With 1 the reference becomes the actor. In bf16 the change by a small mixup is rounded away: then set
    reference.model.dtype: fp32."""
