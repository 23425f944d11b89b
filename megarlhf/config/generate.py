"""Configuration of `megarlhf generate`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from megarlhf.config.data import OF_TRAINING, PromptDataConfig, require_no_weights
from megarlhf.config.environment import EnvironmentConfig, require_environment
from megarlhf.config.rewards import RewardConfig, require_distinct_labels
from megarlhf.config.roles import FrozenModel, RoleConfig, require_all_ranks
from megarlhf.config.rollout import OF_SLICES, RolloutConfig
from megarlhf.config.run import RunConfig
from megarlhf.config.tracking import AccuracyConfig
from megarlhf.config.watchdog import WatchdogConfig


class GenerateConfig(FrozenModel):
    """`megarlhf generate`: sample responses from a model, and score them."""

    command: ClassVar[str] = "generate"
    refused: ClassVar[frozenset[str]] = OF_TRAINING | OF_SLICES

    run: RunConfig
    actor: RoleConfig
    data: PromptDataConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig | None = None
    """Answers the model's turns: a response becomes a conversation."""
    watchdog: WatchdogConfig = WatchdogConfig()
    greedy: bool = True
    """Take the likeliest token; otherwise sample at `rollout.temperature`."""
    rewards: tuple[RewardConfig, ...] = ()
    """Rewards of the responses: all kinds but `model`."""
    eval: AccuracyConfig = AccuracyConfig()
    max_samples: PositiveInt | None = None
    """Number of prompts to read; default: all."""
    out: Path | None = None
    """File for the JSON lines; default: responses.jsonl in the run directory."""
    select: Literal["all", "best", "best_and_worst"] = "all"
    """Responses to write. `all`: every response. `best`: for each prompt the one with the highest reward, in the form
    that `sft` reads (best of n). `best_and_worst`: also the one with the lowest, in the form of pairs for `rm` and
    `dpo`. Responses that were cut or have no reward are not chosen. With several rewards their weighted sum counts."""
    pairs_per_prompt: PositiveInt = 1
    """Most pairs for each prompt with `select: best_and_worst`: the best and the worst response, the next best and the
    next worst, and so on while their rewards differ. No response is in two pairs."""
    min_reward: float | None = None
    """Leave out prompts whose best response has a lower reward; with `select` only."""

    def roles(self) -> dict[str, RoleConfig]:
        """The role that this run builds."""
        return {"actor": self.actor}

    @model_validator(mode="after")
    def _check(self) -> GenerateConfig:
        require_all_ranks({"actor": self.actor})
        self.rollout.require_whole()
        require_environment(self.environment, self.rewards)
        if self.environment is not None and self.select == "best_and_worst":
            raise ValueError(
                "select = best_and_worst makes pairs of responses to one prompt, and conversations with an environment "
                "part with the first turn; set select: best, or all"
            )
        if any(reward.kind == "model" for reward in self.rewards):
            raise ValueError(
                "generate and eval build no reward model; got a reward of kind 'model'. Give its Hugging Face "
                "directory (an export of rm is one) as {kind: classifier, path: ...}, or a rule"
            )
        scaling = ("weight", "shift", "clip", "normalise") if self.select == "all" else ("shift", "clip", "normalise")
        changed = [
            f"rewards[{n}].{name} = {getattr(reward, name)}"
            for n, reward in enumerate(self.rewards)
            for name in reward.changed(*scaling)
        ]
        if changed:
            raise ValueError(f"generate and eval write rewards unchanged; remove {', '.join(changed)}")
        require_distinct_labels(self.rewards)
        if self.select != "all" and (not self.rewards or self.rollout.num_samples_per_prompt < 2):
            raise ValueError(
                f"select = {self.select} chooses among the responses to a prompt by their rewards; got "
                f"{len(self.rewards)} rewards and rollout.num_samples_per_prompt = "
                f"{self.rollout.num_samples_per_prompt}: give one reward or more, and 2 samples or more"
            )
        if self.pairs_per_prompt > 1 and self.select != "best_and_worst":
            raise ValueError(
                f"pairs_per_prompt = {self.pairs_per_prompt} has no effect with select = {self.select}; set "
                "select: best_and_worst"
            )
        if self.pairs_per_prompt > 1 and 2 * self.pairs_per_prompt > self.rollout.num_samples_per_prompt:
            raise ValueError(
                f"pairs_per_prompt = {self.pairs_per_prompt} needs two responses a pair; got "
                f"rollout.num_samples_per_prompt = {self.rollout.num_samples_per_prompt}: set it to "
                f"{2 * self.pairs_per_prompt} or more"
            )
        if self.min_reward is not None and self.select == "all":
            raise ValueError(f"min_reward = {self.min_reward} has no effect with select = all; set select: best")
        if self.greedy:
            self.rollout.require_greedy()
        self.data.require_train_alone("generate", "the prompts to answer")
        require_no_weights("data.train", self.data.train)
        return self
