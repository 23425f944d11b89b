"""Configuration of `megarlhf generate` and `megarlhf eval`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from megarlhf.config.data import OF_TRAINING, PromptDataConfig, require_no_weights
from megarlhf.config.rewards import RewardConfig
from megarlhf.config.roles import FrozenModel, RoleConfig, require_all_ranks
from megarlhf.config.rollout import RolloutConfig
from megarlhf.config.run import RunConfig
from megarlhf.config.tracking import AccuracyConfig
from megarlhf.config.watchdog import WatchdogConfig


class GenerateConfig(FrozenModel):
    """`megarlhf generate` and `megarlhf eval`: sample from a model, and score what it says."""

    refused: ClassVar[frozenset[str]] = OF_TRAINING

    run: RunConfig
    actor: RoleConfig
    data: PromptDataConfig
    rollout: RolloutConfig = RolloutConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    greedy: bool = True
    """Take the likeliest token; otherwise sample at `rollout.temperature`."""
    rewards: tuple[RewardConfig, ...] = ()
    """All kinds but `model`."""
    eval: AccuracyConfig = AccuracyConfig()
    max_samples: PositiveInt | None = None
    """Use only the first so many prompts."""
    out: Path | None = None
    """Where `generate` writes JSON lines; default: responses.jsonl in the run directory."""
    select: Literal["all", "best", "best_and_worst"] = "all"
    """Of `generate`: write every response; or for each prompt the one of the highest reward, as `sft` reads it (best of
    n); or that and the one of the lowest, as `rm` and `dpo` read pairs. Responses that were cut or got no reward are
    not chosen. With several rewards their weighted sum counts."""
    pairs_per_prompt: PositiveInt = 1
    """With `select: best_and_worst`: at most so many pairs of a prompt's responses, the best and the worst, the next
    best and the next worst, and so on while their rewards differ; no response is in two pairs."""
    min_reward: float | None = None
    """With `select`: leave out prompts whose best response has less."""

    @model_validator(mode="after")
    def _check(self) -> GenerateConfig:
        require_all_ranks({"actor": self.actor})
        if any(reward.kind == "model" for reward in self.rewards):
            raise ValueError(
                "generate and eval build no reward model; got a reward of kind 'model'. Give its Hugging Face "
                "directory (an export of rm is one) as {kind: classifier, path: ...}, or a rule"
            )
        plain = RewardConfig.model_fields
        changed = [
            f"rewards[{n}].{name} = {getattr(reward, name)}"
            for n, reward in enumerate(self.rewards)
            for name in ("weight", "shift", "clip", "normalise")
            if not (name == "weight" and self.select != "all")
            if getattr(reward, name) != plain[name].default
        ]
        if changed:
            raise ValueError(f"generate and eval write what a rule says, unchanged; remove {', '.join(changed)}")
        labels = [reward.label for reward in self.rewards]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(
                f"rewards has {', '.join(repeated)} more than once, and figures would have one name; once will do, or "
                "give them names: rewards[].name"
            )
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
        samples = self.rollout.num_samples_per_prompt
        if self.greedy and self.rollout.filters:
            raise ValueError(
                f"{' and '.join(self.rollout.filters)} has no effect with greedy = true, which takes the likeliest "
                "token; set greedy to false, or leave it out"
            )
        if self.greedy and samples > 1:
            raise ValueError(
                f"rollout.num_samples_per_prompt = {samples} with greedy = true would write {samples} equal responses "
                "for each prompt; set greedy to false, or the number to 1"
            )
        self.data.require_train_alone("generate", "the prompts that are meant")
        require_no_weights("data.train", self.data.train)
        return self
