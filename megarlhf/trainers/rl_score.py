"""Rollouts become experience: rewards, log-probs of both policies, and values.

Legend: B rows, S positions, N samples of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarlhf.config import MicroBatchConfig, RLConfig
from megarlhf.data.samples import PromptSample
from megarlhf.experience import Experience, Ragged
from megarlhf.models.role import Role
from megarlhf.parallel.step import MicroBatch
from megarlhf.parallel.vocab import next_token_logprobs
from megarlhf.rollout.engine import sample_seed
from megarlhf.trainers.rl_advantages import ADVANTAGES
from megarlhf.trainers.rl_batches import forward_per_token
from megarlhf.trainers.rl_components import Components
from megarlhf.trainers.rl_rewards import Rewarded
from megarlhf.trainers.rl_rollout import make_experience
from megarlhf.trainers.rl_updates import mini_batches_of_pass
from megarlhf.trainers.session import Session


def score(
    cfg: RLConfig,
    components: Components,
    experience: Experience,
    prompts: Sequence[PromptSample],
    step: int,
    session: Session,
) -> tuple[Experience, dict[str, float]]:
    """With rewards, old and reference log-probs, and values; and what the rewards were like.

    Rewards begin first and are waited for last: functions and servers work while the roles compute. The forwards run on
    the micro-batches that the first pass will train on, so that its first ratio is 1.
    """
    per_prompt = cfg.rollout.num_samples_per_prompt
    repeated = [prompt for prompt in prompts for _ in range(per_prompt)]
    under_way = components.rewarder.start(experience, repeated)
    experience = with_forwards(cfg, components, experience, step, session)
    with session.stoppable("reward"):
        rewarded = under_way.finish(session.asked_to_stop)
    if "greedy_rewards" in ADVANTAGES[cfg.algo.advantage].reads:
        greedy_N = greedy_rewards(components, prompts, session).repeat_interleave(per_prompt)
        experience = experience.with_per_sample({"greedy_rewards": greedy_N})
    return with_rewards(experience, rewarded, cfg, step), rewarded.metrics


def with_rewards(experience: Experience, rewarded: Rewarded, cfg: RLConfig, step: int) -> Experience:
    """The rewards as columns. Samples without one are left out of the losses, and are no group's."""
    rewards_N, kept_N = rewarded.rewards_N, rewarded.kept_N
    if cfg.algo.shuffle_rewards:
        generator = torch.Generator().manual_seed(sample_seed(cfg.run.seed, step, -1))
        order_N = torch.randperm(len(rewards_N), generator=generator).to(rewards_N.device)
        rewards_N, kept_N = rewards_N[order_N], kept_N[order_N]
    columns = {"rewards": rewards_N, **rewarded.per_sample}
    if rewarded.token_rewards is not None:
        experience = experience.with_columns({"token_rewards": rewarded.token_rewards})
    if bool(kept_N.all()):
        return experience.with_per_sample(columns)
    groups_N = experience.groups_N.clone()
    lost = (~kept_N.cpu()).nonzero().flatten()
    groups_N[lost] = int(groups_N.max()) + 1 + torch.arange(len(lost))
    return replace(experience, groups_N=groups_N).with_per_sample({**columns, "trained": kept_N})


def with_forwards(
    cfg: RLConfig, components: Components, experience: Experience, step: int, session: Session
) -> Experience:
    """Old and reference log-probs, and values where there is a critic."""
    micro, temperature = cfg.train, cfg.rollout.temperature
    mini_batches = mini_batches_of_pass(cfg, experience, step, 0)
    columns: dict[str, Ragged] = {}
    for name, role in (("old_logprobs", components.actor), ("ref_logprobs", components.reference)):
        with session.stoppable(f"score/{role.name}"):
            columns[name] = policy_logprobs(role, experience, mini_batches, micro, temperature=temperature)
    if components.critic is not None:
        with session.stoppable("score/critic"):
            columns["values"] = values_of(components.critic, experience, mini_batches, micro)
    return experience.with_columns(columns)


def greedy_rewards(components: Components, prompts: Sequence[PromptSample], session: Session) -> Tensor:
    """The reward of the greedy response to each prompt, by the same weights as the step's samples: [prompts]."""
    rows = [torch.tensor(prompt.tokens) for prompt in prompts]
    greedy = replace(components.sampling, greedy=True)
    with session.stoppable("rollout"):
        rollouts = components.engine.generate(rows, [0] * len(rows), greedy, should_stop=session.asked_to_stop)
        components.phases.count("rollout_tokens_per_second", float(rollouts.responses.num_tokens))
    with session.stoppable("reward"):
        under_way = components.rewarder.start(make_experience(prompts, rollouts, 1), prompts)
        return under_way.finish(session.asked_to_stop, learn=False).rewards_N


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
