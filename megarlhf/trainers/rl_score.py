"""Rollouts become experience: log-probs of both policies, values, rewards and advantages.

Legend: B rows, S positions, N samples of the step, T response tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarlhf.algo.advantages import group_relative, leave_one_out
from megarlhf.algo.kl import kl_estimate
from megarlhf.config import AlgoConfig, MicroBatchConfig, RewardConfig
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience import Experience, Ragged, Rollouts
from megarlhf.kernels import packed_gae, packed_sums, packed_whiten
from megarlhf.models.role import Role
from megarlhf.observe.phases import Phases
from megarlhf.parallel.step import MicroBatch
from megarlhf.parallel.vocab import next_token_logprobs
from megarlhf.rollout.rewards.rules import load_rule
from megarlhf.rollout.rewards.score import response_texts, rule_rewards
from megarlhf.trainers.rl_batches import forward_per_sample, forward_per_token


def make_experience(prompts: Sequence[PromptSample], rollouts: Rollouts, num_samples_per_prompt: int) -> Experience:
    """The table's index: sample n answers prompt n // num_samples_per_prompt."""
    repeated = [prompt for prompt in prompts for _ in range(num_samples_per_prompt)]
    return Experience(
        prompts=tuple(torch.tensor(prompt.tokens) for prompt in repeated),
        groups_N=torch.arange(len(prompts)).repeat_interleave(num_samples_per_prompt),
        rollouts=rollouts,
    )


def policy_logprobs(
    role: Role,
    experience: Experience,
    mini_batches: Sequence[Sequence[int]],
    micro: MicroBatchConfig,
    *,
    temperature: float,
) -> Ragged:
    """Log-probs of the sampled tokens under actor or reference, at the sampling temperature."""

    vocabulary = role.shard.vocabulary()

    def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        logprobs_BS, _ = next_token_logprobs(
            vocabulary,
            hidden_SBH,
            batch.tokens_BS,
            batch.columns["response_mask"],
            temperature=temperature,
            return_entropy=False,
        )
        return logprobs_BS

    return forward_per_token(role, experience, mini_batches, micro, score)


def values_of(
    critic: Role, experience: Experience, mini_batches: Sequence[Sequence[int]], micro: MicroBatchConfig
) -> Ragged:
    """The critic's value of the state before each response token."""
    return forward_per_token(critic, experience, mini_batches, micro, lambda values_BS1, batch: values_BS1[..., 0])


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


_GROUP_ADVANTAGES: dict[str, Callable[[Tensor, Tensor, AlgoConfig], Tensor]] = {
    "group_relative": lambda rewards_N, groups_N, algo: group_relative(
        rewards_N, groups_N, scale_by_std=algo.scale_by_group_std
    ),
    "leave_one_out": lambda rewards_N, groups_N, algo: leave_one_out(rewards_N, groups_N),
}


def add_advantages(experience: Experience, algo: AlgoConfig) -> Experience:
    """Advantages (and, with a critic, returns) for every response token. The same on every rank."""
    if algo.advantage not in (known := ("gae", *_GROUP_ADVANTAGES)):
        raise ValueError(f"algo.advantage = {algo.advantage!r} is not computed here; the known ones are {known}")
    rewards_N = experience.per_sample["rewards"]
    like = experience.columns["old_logprobs"]
    coef = algo.kl.coef if algo.kl.placement == "reward" else 0.0
    ref_T = experience.columns["ref_logprobs"].values_T if coef > 0 else None
    if algo.advantage == "gae":
        advantages_T, returns_T = packed_gae(
            like.values_T,
            ref_T,
            experience.columns["values"].values_T,
            rewards_N,
            like.cu_seqlens,
            gamma=algo.gamma,
            lam=algo.lam,
            kl_coef=coef,
            kl_kind=algo.kl.estimator,
        )
        if algo.whiten_advantages:
            advantages_T = packed_whiten(advantages_T)
        columns = {"advantages": advantages_T, "returns": returns_T}
        return experience.with_columns({name: Ragged(x_T, like.lengths_N) for name, x_T in columns.items()})
    if ref_T is not None:
        kl_T = kl_estimate(like.values_T, ref_T, algo.kl.estimator)
        rewards_N = rewards_N - coef * packed_sums(kl_T, like.cu_seqlens)
    groups_N = experience.groups_N.to(rewards_N.device)
    advantages_N = _GROUP_ADVANTAGES[algo.advantage](rewards_N, groups_N, algo)
    return experience.with_columns({"advantages": like.repeat_per_token(advantages_N)})
