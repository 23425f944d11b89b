"""Dynamic sampling: chooses the samples that a step trains on, after the rewards and before the log-probs.

Legend: N samples, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarlhf.algo.advantages import without_signal
from megarlhf.config import DynamicSamplingConfig, RewardConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.experience import Experience
from megarlhf.rollouts import Rollouts
from megarlhf.trainers.experience.prompts import make_experience
from megarlhf.trainers.experience.reward_outputs import RewardOutput, bounded, totals_of


@dataclass(frozen=True)
class ScoredRollout:
    """Prompts, their responses, and the outputs of each reward."""

    prompts: Sequence[PromptSample]
    """One for each group; the samples of a group stand together."""
    experience: Experience
    rewards: Sequence[RewardOutput]

    def samples_of(self, groups: Sequence[int]) -> list[int]:
        """Samples of the groups, in their order."""
        size = self.experience.num_samples // len(self.prompts)
        return [group * size + n for group in groups for n in range(size)]


DrawMore = Callable[[int, int, Sequence[PromptSample]], ScoredRollout | None]
"""(round, missing groups, all prompts so far) -> responses to further prompts; None: no prompts are left."""


Signal = Callable[[ScoredRollout, Sequence[RewardConfig], DynamicSamplingConfig], list[int]]
"""Function that returns the groups that teach something, such as `groups_with_signal`."""


def select(
    first: ScoredRollout,
    draw_more: DrawMore,
    rewards: Sequence[RewardConfig],
    cfg: DynamicSamplingConfig,
    signal: Signal | None = None,
) -> tuple[ScoredRollout, dict[str, float]]:
    """Choose as many groups as `first` has without the surplus: the first ones with signal from all rounds, filled up
    with groups without; returns metrics too. The same on every rank.

    first:  the step's own prompts, then those of the surplus
    signal: default: `groups_with_signal`
    """
    signal, rounds, wanted = signal or groups_with_signal, [first], len(first.prompts) - cfg.surplus
    useful = [(0, group) for group in signal(first, rewards, cfg)]
    while len(useful) < wanted and len(rounds) <= cfg.max_refills:
        used = [prompt for rollout in rounds for prompt in rollout.prompts]
        more = draw_more(len(rounds), wanted - len(useful), used)
        if more is None:
            break
        useful += [(len(rounds), group) for group in signal(more, rewards, cfg)]
        rounds.append(more)
    drawn = [(round, group) for round, rollout in enumerate(rounds) for group in range(len(rollout.prompts))]
    dropped = [pair for pair in drawn if pair not in set(useful)]
    missing = max(0, wanted - len(useful))
    pairs = sorted(useful[:wanted] + dropped[:missing])
    by_round = [[group for round, group in pairs if round == n] for n in range(len(rounds))]
    chosen = joined([(rollout, groups) for rollout, groups in zip(rounds, by_round, strict=True) if groups])
    return chosen, {
        "groups_drawn": len(drawn),
        "groups_dropped": len(dropped),
        "groups_filled_up": missing,
        "groups_unused": len(useful) + missing - wanted,
        "tokens_unused": sum(map(_num_tokens, rounds)) - _num_tokens(chosen),
        "sampling_rounds": len(rounds),
    }


def _num_tokens(drawn: ScoredRollout) -> int:
    return drawn.experience.rollouts.responses.num_tokens


def joined(parts: Sequence[tuple[ScoredRollout, Sequence[int]]]) -> ScoredRollout:
    """Join chosen groups of several rounds, with new group numbers."""
    rows = [(rollout, rollout.samples_of(groups)) for rollout, groups in parts]
    prompts = [rollout.prompts[group] for rollout, groups in parts for group in groups]
    size = sum(len(samples) for _, samples in rows) // len(prompts)
    rollouts = Rollouts.joined([(rollout.experience.rollouts, samples) for rollout, samples in rows])
    experience = make_experience(prompts, rollouts, size)
    by_reward = range(len(parts[0][0].rewards))
    rewards = [RewardOutput.joined([(rollout.rewards[k], samples) for rollout, samples in rows]) for k in by_reward]
    return ScoredRollout(prompts, experience, rewards)


def groups_with_signal(drawn: ScoredRollout, rewards: Sequence[RewardConfig], cfg: DynamicSamplingConfig) -> list[int]:
    """Groups whose responses differ in reward, and whose mean reward is in `reward_range`.

    The weighted sum of the rewards, less shift and clipped, is compared. A reward that is normalised is also compared
    alone, because equal sums may differ after normalisation. Samples without a reward, or with a failed one, are
    ignored.
    """
    groups_N, outputs = drawn.experience.groups_N, drawn.rewards
    total_N = totals_of(rewards, outputs).cpu().double()
    normalised = [
        bounded(reward, output.values_N).float().cpu().masked_fill(total_N.isnan(), torch.nan)
        for reward, output in zip(rewards, outputs, strict=True)
        if reward.normalise != "none"
    ]
    differs_N = torch.stack([_differs(values_N, groups_N) for values_N in (total_N, *normalised)]).any(0)
    useful = [group for group in range(len(drawn.prompts)) if bool(differs_N[groups_N == group].any())]
    if cfg.reward_range is None:
        return useful
    low, high = cfg.reward_range
    return [g for g in useful if low < float(total_N[groups_N == g].nanmean()) < high]


def _differs(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """[N] bool: whether two values of the sample's group differ; NaN is ignored."""
    present_N = ~values_N.isnan()
    differs_N = torch.zeros_like(present_N)
    if bool(present_N.any()):
        differs_N[present_N] = ~without_signal(values_N[present_N], groups_N[present_N])
    return differs_N
