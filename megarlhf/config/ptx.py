"""Configuration of what else the actor and the reference do beside the policy's loss in `rl`."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

from megarlhf.config.roles import FrozenModel, Positive


class PTXConfig(FrozenModel):
    """Pretraining mix (PPO-ptx of InstructGPT): plain text that the actor goes on to predict while it is aligned.

    Each of the actor's updates adds coef x the mean next-token loss of a mini-batch of texts to the policy's loss.
    """

    data: Path
    """Records with `text`, in any form that `data.train` may have."""
    data_split: str | None = None
    """Which split of `data` to read, where it has several."""
    coef: Positive = 27.8
    """InstructGPT's, and DeepSpeed-Chat's unsup_coef. DeepSpeed-Chat makes an optimizer step of its own of it."""
    mini_batch_samples: PositiveInt | None = None
    """Texts per update of the actor, over all ranks; default: train.mini_batch_samples."""
    max_tokens: PositiveInt | None = None
    """A longer text is cut into texts of so many tokens; default: data.max_prompt_tokens +
    rollout.max_response_tokens."""
