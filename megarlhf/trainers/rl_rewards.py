"""The reward of each response: the weighted sum of the configured rewards.

Legend: B rows, S positions, N samples of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarlhf.config import MicroBatchConfig, RewardConfig
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.observe.phases import Phases
from megarlhf.parallel.step import MicroBatch
from megarlhf.rollout.rewards.rules import load_rule
from megarlhf.rollout.rewards.score import response_texts, rule_rewards
from megarlhf.trainers.rl_batches import forward_per_sample


def model_scores(reward_model: Role, experience: Experience, micro: MicroBatchConfig) -> Tensor:
    """The reward model's score on the last token of each response, [N]."""

    def score(scores_BS1: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.layout is not None
        return scores_BS1.flatten()[batch.layout.ends_K.to(scores_BS1.device)]

    return forward_per_sample(reward_model, experience, micro, score)


@dataclass(frozen=True)
class Rewarder:
    """The weighted sum of the configured rewards."""

    rewards: Sequence[RewardConfig]
    reward_model: Role | None
    tokenizer: Tokenizer
    micro: MicroBatchConfig
    device: torch.device
    phases: Phases = field(default_factory=Phases)

    def __call__(
        self,
        experience: Experience,
        prompts: Sequence[PromptSample],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """Rewards [N] fp32; `prompts` are one per sample. Raises: Interrupted, see `rule_rewards`."""
        total_N = torch.zeros(experience.num_samples, device=self.device)
        for reward in self.rewards:
            if reward.kind == "model":
                assert self.reward_model is not None
                reward_N = model_scores(self.reward_model, experience, self.micro)
            else:
                responses = response_texts(experience.rollouts, self.tokenizer)
                rule, local = load_rule(str(reward.rule)), self.phases.local
                reward_N = rule_rewards(rule, prompts, responses, self.device, local=local, should_stop=should_stop)
            reward_N = reward_N - reward.shift
            if reward.clip is not None:
                reward_N = reward_N.clamp(-reward.clip, reward.clip)
            total_N += reward.weight * reward_N
        if not bool(total_N.isfinite().all()):
            worst = int((~total_N.isfinite()).nonzero()[0])
            raise FloatingPointError(
                f"the reward of sample {worst} is {float(total_N[worst])}; look at the reward model or the rules"
            )
        return total_N
